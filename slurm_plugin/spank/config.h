/* SPDX-License-Identifier: Apache-2.0 */
#ifndef UNICRON_CONFIG_H
#define UNICRON_CONFIG_H

#include <limits.h>
#include <stdbool.h>

#define UNICRON_HOST_MAX 256
#define UNICRON_CONTROLLERS 4           /* one, and its standbys */
#define UNICRON_ONE_ADDRESS_MAX (UNICRON_HOST_MAX + 16)
#define UNICRON_ADDRESS_MAX (UNICRON_CONTROLLERS * UNICRON_ONE_ADDRESS_MAX)

/* What the administrator wrote behind the plugin's name in plugstack.conf. */
struct plugin_config {
	char agent[PATH_MAX];                 /* agent=/path/to/unicron-agent, empty when not given */
	char controller[UNICRON_ADDRESS_MAX]; /* controller=tcp://host:port[,...], empty when not given */
	char file[PATH_MAX];                  /* config=FILE, empty when not given */
	bool by_default;                      /* default=on: jobs are protected unless they say --no-unicron */
};

/*
 * Reads the plugin's arguments. Strict: an unknown key or a bad value is logged once and makes the result -1,
 * and the caller then does nothing at all, so that a typing error never costs anyone a job.
 */
int config_parse(struct plugin_config *config, int ac, char **av);

/* "tcp://host:port" or "tcp://[v6]:port" into its parts. 0, or -1 when it is not such an address. */
int config_split_address(const char *address, char host[UNICRON_HOST_MAX], unsigned *port);

/*
 * The first address of a list with commas in it, and where the rest begins, NULL at the end. 0, or -1 when it is too
 * long for an address.
 */
int config_next_address(const char **list, char address[UNICRON_ONE_ADDRESS_MAX]);

#endif
