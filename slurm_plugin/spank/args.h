/* SPDX-License-Identifier: Apache-2.0 */
#ifndef UNICRON_ARGS_H
#define UNICRON_ARGS_H

#include <stdbool.h>

#include "unicron.h"

#define UNICRON_NUMBER_MAX 32
#define UNICRON_PRELOAD_MAX 1024

/* What the job asked for. Numbers stay text, as the user wrote them: they are only checked here and handed on. */
struct plugin_args {
	bool said_on;                          /* --unicron was given, here or in an enclosing sbatch or salloc */
	bool said_off;                         /* --no-unicron likewise */
	int last;                              /* the one of the two that came last: 1, 0, or -1 for neither */
	char weight[UNICRON_NUMBER_MAX];       /* empty: not given */
	char min_nodes[UNICRON_NUMBER_MAX];    /* empty: not given */
	const char *mode;                      /* NULL: not given */
	char spares[UNICRON_NUMBER_MAX];       /* empty: not given */
	char preload[UNICRON_PRELOAD_MAX];     /* empty: not given */
};

/* The decision, after options, environment and the administrator's default. */
struct plugin_choice {
	bool enabled;
	bool spoken;                           /* the user said yes or no in some way: the default did not decide */
	char weight[UNICRON_NUMBER_MAX];
	char min_nodes[UNICRON_NUMBER_MAX];    /* empty: nobody said so, and the agent decides */
	const char *mode;                      /* "auto", "session" or "restart" */
	char spares[UNICRON_NUMBER_MAX];       /* empty: none */
	char preload[UNICRON_PRELOAD_MAX];     /* modules; empty: the option was not given, the environment counts */
};

/* Registers the options; to be called from slurm_spank_init in each context in which they may be used. */
int args_register(spank_t sp);

/*
 * Combines what was said. An option beats its environment variable (UNICRON, UNICRON_WEIGHT, UNICRON_MIN_NODES,
 * UNICRON_MODE, UNICRON_SPARES), which beats the default. --unicron-weight, --unicron-min-nodes, --unicron-mode and
 * --unicron-spares mean --unicron as well, unless something said no.
 * --unicron-preload means --unicron, too; its variable, UNICRON_PRELOAD, is the agent's to check.
 * A bad environment variable: -1 with one line logged; the choice then holds the default in its place.
 */
int args_choose(spank_t sp, bool by_default, struct plugin_choice *choice);

/* 0 when the text is a finite number above zero (a whole number of at least one), which fits the field; else -1. */
int args_check_weight(const char *text);
int args_check_min_nodes(const char *text);

/* The same for a whole number of at least zero. */
int args_check_spares(const char *text);

/* The mode of that name, or NULL. */
const char *args_find_mode(const char *text);

/* Forgets all options: for tests. */
void args_reset(void);

#endif
