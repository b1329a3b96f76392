/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config.h"
#include "unicron.h"

int config_split_address(const char *address, char host[UNICRON_HOST_MAX], unsigned *port)
{
	const char *start, *colon, *end;
	size_t length;
	unsigned long number;
	char *stop;

	if (strncmp(address, "tcp://", 6) != 0)
		return (-1);
	start = address + 6;
	colon = strrchr(start, ':');
	if (colon == NULL)
		return (-1);
	end = colon;
	if (*start == '[') {
		if (end[-1] != ']')
			return (-1);
		start++;
		end--;
	} else if (memchr(start, ':', (size_t) (end - start)) != NULL) {
		return (-1);
	}
	if (end <= start)
		return (-1);
	length = (size_t) (end - start);
	if (length >= UNICRON_HOST_MAX)
		return (-1);
	if (strspn(colon + 1, "0123456789") != strlen(colon + 1) || colon[1] == '\0')
		return (-1);
	number = strtoul(colon + 1, &stop, 10);
	if (number < 1 || number > 65535)
		return (-1);

	memcpy(host, start, length);
	host[length] = '\0';
	*port = (unsigned) number;
	return (0);
}

int config_next_address(const char **list, char address[UNICRON_ONE_ADDRESS_MAX])
{
	size_t length = strcspn(*list, ",");
	const char *start = *list;

	*list = start[length] == ',' ? start + length + 1 : NULL;
	if (length >= UNICRON_ONE_ADDRESS_MAX)
		return (-1);
	memcpy(address, start, length);
	address[length] = '\0';
	return (0);
}

static int copy_value(char *target, size_t size, const char *argument, const char *value)
{
	if (strlen(value) >= size) {
		slurm_error("unicron: couldn't read the plugin argument \"%s\": it is longer than %zu characters",
			    argument, size - 1);
		return (-1);
	}
	memcpy(target, value, strlen(value) + 1);
	return (0);
}

static int parse_path(char target[PATH_MAX], const char *argument, const char *value)
{
	if (value[0] != '/') {
		slurm_error("unicron: couldn't read the plugin argument \"%s\": write an absolute path", argument);
		return (-1);
	}
	return (copy_value(target, PATH_MAX, argument, value));
}

static int parse_controller(struct plugin_config *config, const char *argument, const char *value)
{
	char one[UNICRON_ONE_ADDRESS_MAX], host[UNICRON_HOST_MAX];
	const char *rest = value;
	unsigned count = 0, port;

	while (rest != NULL) {
		if (++count > UNICRON_CONTROLLERS || config_next_address(&rest, one) < 0 ||
		    config_split_address(one, host, &port) < 0) {
			slurm_error("unicron: couldn't read the plugin argument \"%s\": write controller=tcp://HOST:PORT, "
				    "and a standby's behind a comma", argument);
			return (-1);
		}
	}
	return (copy_value(config->controller, sizeof(config->controller), argument, value));
}

static int parse_default(struct plugin_config *config, const char *argument, const char *value)
{
	if (strcmp(value, "on") == 0)
		config->by_default = true;
	else if (strcmp(value, "off") == 0)
		config->by_default = false;
	else {
		slurm_error("unicron: couldn't read the plugin argument \"%s\": write default=on or default=off", argument);
		return (-1);
	}
	return (0);
}

int config_parse(struct plugin_config *config, int ac, char **av)
{
	int ret;

	memset(config, 0, sizeof(*config));
	for (int i = 0; i < ac; ++i) {
		if (strncmp(av[i], "agent=", 6) == 0)
			ret = parse_path(config->agent, av[i], av[i] + 6);
		else if (strncmp(av[i], "controller=", 11) == 0)
			ret = parse_controller(config, av[i], av[i] + 11);
		else if (strncmp(av[i], "config=", 7) == 0)
			ret = parse_path(config->file, av[i], av[i] + 7);
		else if (strncmp(av[i], "default=", 8) == 0)
			ret = parse_default(config, av[i], av[i] + 8);
		else {
			slurm_error("unicron: couldn't read the plugin argument \"%s\": "
				    "write agent=, controller=, config= or default= in plugstack.conf", av[i]);
			ret = -1;
		}
		if (ret < 0)
			return (-1);
	}
	return (0);
}
