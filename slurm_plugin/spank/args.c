/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"

static struct plugin_args said = { .last = -1 };

static int option_unicron(int val, const char *optarg, int remote);
static int option_value(int val, const char *optarg, int remote);
static bool is_weight(const char *text);
static bool is_from_1(const char *text);
static bool is_mode(const char *text);
static bool is_from_0(const char *text);
static bool is_modules(const char *text);

static struct spank_option options[] = {
	{
		"unicron", NULL,
		"[unicron] let Unicron heal this job: the agent is started in front of the command",
		0, 1, option_unicron
	},
	{
		"no-unicron", NULL,
		"[unicron] run without Unicron, also where the cluster's default is on",
		0, 0, option_unicron
	},
	{
		"unicron-weight", "WEIGHT",
		"[unicron] weight of this job when nodes are shared out: a number above 0 (default: 1.0); implies --unicron",
		1, ARGS_WEIGHT, option_value
	},
	{
		"unicron-min-nodes", "NODES",
		"[unicron] fewest nodes on which this job may run: a whole number from 1 (default: what the job's launcher says, else 1); "
		"implies --unicron",
		1, ARGS_MIN_NODES, option_value
	},
	{
		"unicron-mode", "MODE",
		"[unicron] how failures are healed: session (the script uses unicron.Session), restart (any program, all "
		"processes start again) or auto (by the text of the script; the default); implies --unicron",
		1, ARGS_MODE, option_value
	},
	{
		"unicron-spares", "COUNT",
		"[unicron] elements of the array that wait ready to replace a lost one: a whole number from 0 (default: 0); "
		"implies --unicron",
		1, ARGS_SPARES, option_value
	},
	{
		"unicron-preload", "MODULES",
		"[unicron] Python modules that ranks find imported when they start, with commas between (default: those that "
		"the script imports at its top); implies --unicron",
		1, ARGS_PRELOAD, option_value
	},
	SPANK_OPTIONS_TABLE_END
};

/* variable: read where the option was not given, except for that of the modules, which the agent checks. */
static const struct {
	const char *option, *variable;
	bool is_read;
	const char *standard;
	bool (*fits)(const char *text);
	const char *advice, *example;
} values[ARGS_VALUES] = {
	[ARGS_WEIGHT] = { "--unicron-weight", "UNICRON_WEIGHT", true, "1.0", is_weight, "a number above 0", "2.5" },
	[ARGS_MIN_NODES] = { "--unicron-min-nodes", "UNICRON_MIN_NODES", true, "", is_from_1, "a whole number from 1", "2" },
	[ARGS_MODE] = { "--unicron-mode", "UNICRON_MODE", true, "auto", is_mode, "auto, session or restart", NULL },
	[ARGS_SPARES] = { "--unicron-spares", "UNICRON_SPARES", true, "", is_from_0, "a whole number from 0", "1" },
	[ARGS_PRELOAD] = { "--unicron-preload", "UNICRON_PRELOAD", false, "", is_modules,
			   "names of modules with commas between", "torch,megatron.core" },
};

int args_register(spank_t sp)
{
	for (struct spank_option *option = options; option->name != NULL; ++option) {
		if (spank_option_register(sp, option) != ESPANK_SUCCESS) {
			slurm_error("unicron: couldn't register --%s: another plugin has an option of this name", option->name);
			return (-1);
		}
	}
	return (0);
}

/* A text of these characters alone, and of at least one of them. */
static bool consists_of(const char *text, const char *characters)
{
	return (text[0] != '\0' && text[strspn(text, characters)] == '\0');
}

static bool is_weight(const char *text)
{
	double value;
	char *end;

	/* The character set keeps out what strtod would take besides: spaces, hexadecimal numbers, "inf" and "nan". */
	if (!consists_of(text, "0123456789.eE+-") || strlen(text) >= UNICRON_NUMBER_MAX)
		return (false);
	value = strtod(text, &end);
	return (*end == '\0' && isfinite(value) && value > 0);
}

static bool is_count(const char *text, long least)
{
	long value;

	if (!consists_of(text, "0123456789") || strlen(text) >= UNICRON_NUMBER_MAX)
		return (false);
	errno = 0;
	value = strtol(text, NULL, 10);
	return (errno == 0 && value >= least && value <= INT32_MAX);
}

static bool is_from_1(const char *text)
{
	return (is_count(text, 1));
}

static bool is_from_0(const char *text)
{
	return (is_count(text, 0));
}

static bool is_mode(const char *text)
{
	return (strcmp(text, "auto") == 0 || strcmp(text, "session") == 0 || strcmp(text, "restart") == 0);
}

static bool is_modules(const char *text)
{
	return (consists_of(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.,"));
}

bool args_check(enum args_value which, const char *text)
{
	return (strlen(text) < UNICRON_VALUE_MAX && values[which].fits(text));
}

const char *args_variable(enum args_value which)
{
	return (values[which].variable);
}

/* `name` is how the user knows the value: an option or an environment variable. */
static int take_value(enum args_value which, char target[UNICRON_VALUE_MAX], const char *name, const char *text)
{
	const char *example = values[which].example;

	if (text == NULL || !args_check(which, text)) {
		slurm_error("unicron: couldn't use %s=%.80s: write %s%s%s%s%s", name, text ? text : "", values[which].advice,
			    example ? ", such as " : "", example ? name : "", example ? "=" : "", example ? example : "");
		return (-1);
	}
	strcpy(target, text);
	return (0);
}

static int option_unicron(int val, const char *optarg, int remote)
{
	(void) optarg;
	(void) remote;

	if (val)
		said.said_on = true;
	else
		said.said_off = true;
	said.last = val;
	return (0);
}

/* On the compute node a bad value cannot come from the user any more; to fail there would only cost the job. */
static int option_value(int val, const char *optarg, int remote)
{
	return (take_value(val, said.values[val], values[val].option, optarg) < 0 && !remote ? -1 : 0);
}

/* The variable's value in the job's environment: that of this process before the job exists, Slurm's copy afterwards. */
static const char *job_getenv(spank_t sp, const char *name, char *buffer, int size)
{
	spank_err_t rc;

	if (spank_context() != S_CTX_REMOTE)
		return (getenv(name));
	rc = spank_getenv(sp, name, buffer, size);
	/* A value that was cut short is returned all the same: the checks refuse it. */
	return ((rc == ESPANK_SUCCESS || rc == ESPANK_NOSPACE) ? buffer : NULL);
}

/* 1, 0, -1 when the variable is not set, -2 when it is neither 1 nor 0. */
static int environment_switch(spank_t sp)
{
	char buffer[64], other[8];
	const char *text = job_getenv(sp, "UNICRON", buffer, sizeof(buffer));
	const char *by_default = job_getenv(sp, "UNICRON_BY_DEFAULT", other, sizeof(other));

	if (text == NULL || text[0] == '\0')
		return (-1);
	if (strcmp(text, "1") == 0 && by_default != NULL && strcmp(by_default, "1") == 0)
		return (-1);    /* a step that is protected by default calls srun: nobody has said anything */
	if (strcmp(text, "1") == 0)
		return (1);
	if (strcmp(text, "0") == 0)
		return (0);
	slurm_error("unicron: couldn't use UNICRON=%s: write UNICRON=1 or UNICRON=0", text);
	return (-2);
}

/*
 * 1, 0 or -1 for "nothing was said". Where the job is submitted, the last of --unicron and --no-unicron counts. On the
 * compute node their order is lost when both were given (sbatch --no-unicron, and in it srun --unicron): there the
 * variable tells, in which the submitting side left its result.
 */
static int option_switch(int environment)
{
	if (said.said_on && said.said_off && spank_context() == S_CTX_REMOTE)
		return (environment == 1 ? 1 : 0);
	return (said.last);
}

/* One of the values: the option, the variable, the default. -1 for a variable that makes no sense. */
static int choose_value(spank_t sp, enum args_value which, char target[UNICRON_VALUE_MAX])
{
	char buffer[UNICRON_VALUE_MAX];
	const char *text;
	int rv = 0;

	strcpy(target, said.values[which]);
	if (target[0] == '\0' && values[which].is_read &&
	    (text = job_getenv(sp, values[which].variable, buffer, sizeof(buffer))) != NULL && text[0] != '\0')
		rv = take_value(which, target, values[which].variable, text);
	if (target[0] == '\0')
		strcpy(target, values[which].standard);
	return (rv);
}

int args_choose(spank_t sp, bool by_default, struct plugin_choice *choice)
{
	bool any = false;
	int environment, option;
	int rv = 0;

	memset(choice, 0, sizeof(*choice));
	environment = environment_switch(sp);
	if (environment == -2) {
		environment = -1;
		rv = -1;
	}
	option = option_switch(environment);
	for (enum args_value which = 0; which < ARGS_VALUES; ++which) {
		any = any || said.values[which][0] != '\0';
		if (choose_value(sp, which, choice->values[which]) < 0)
			rv = -1;
	}

	choice->spoken = option >= 0 || environment >= 0 || any;
	choice->enabled = option >= 0 ? option : environment >= 0 ? environment : any || by_default;
	return (rv);
}

void args_reset(void)
{
	memset(&said, 0, sizeof(said));
	said.last = -1;
}
