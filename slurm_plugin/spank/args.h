/* SPDX-License-Identifier: Apache-2.0 */
#ifndef UNICRON_ARGS_H
#define UNICRON_ARGS_H

#include <stdbool.h>

#include "unicron.h"

#define UNICRON_NUMBER_MAX 32
#define UNICRON_VALUE_MAX 1024

/* What has a value: an option and a variable each. */
enum args_value { ARGS_WEIGHT, ARGS_MIN_NODES, ARGS_MODE, ARGS_SPARES, ARGS_PRELOAD, ARGS_VALUES };

/* What the job asked for. Numbers stay text, as the user wrote them: they are only checked here and handed on. */
struct plugin_args {
	bool said_on;                          /* --unicron was given, here or in an enclosing sbatch or salloc */
	bool said_off;                         /* --no-unicron likewise */
	int last;                              /* the one of the two that came last: 1, 0, or -1 for neither */
	char values[ARGS_VALUES][UNICRON_VALUE_MAX];    /* empty: not given */
};

/* The decision, after options, environment and the administrator's default. */
struct plugin_choice {
	bool enabled;
	bool spoken;                           /* the user said yes or no in some way: the default did not decide */
	char values[ARGS_VALUES][UNICRON_VALUE_MAX];    /* empty: nobody said so, and the agent decides */
};

/* Registers the options; to be called from slurm_spank_init in each context in which they may be used. */
int args_register(spank_t sp);

/*
 * Combines what was said. An option beats its environment variable, which beats the default; an empty variable says nothing. Each of
 * the options with a value means --unicron as well, unless something said no. The variable of --unicron-preload is the agent's to check.
 * A bad environment variable: -1 with one line logged; the choice then holds the default in its place.
 */
int args_choose(spank_t sp, bool by_default, struct plugin_choice *choice);

/* Whether the text is such a value. */
bool args_check(enum args_value which, const char *text);

/* The variable in which the value is handed on. */
const char *args_variable(enum args_value which);

/* Forgets all options: for tests. */
void args_reset(void);

#endif
