/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "args.h"

static struct plugin_args said = { .last = -1 };

static int option_unicron(int val, const char *optarg, int remote);
static int option_weight(int val, const char *optarg, int remote);
static int option_min_nodes(int val, const char *optarg, int remote);
static int option_mode(int val, const char *optarg, int remote);
static int option_spares(int val, const char *optarg, int remote);
static int option_preload(int val, const char *optarg, int remote);

static const char *const modes[] = { "auto", "session", "restart" };

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
		1, 0, option_weight
	},
	{
		"unicron-min-nodes", "NODES",
		"[unicron] fewest nodes on which this job may run: a whole number from 1 (default: what the job's launcher says, else 1); "
		"implies --unicron",
		1, 0, option_min_nodes
	},
	{
		"unicron-mode", "MODE",
		"[unicron] how failures are healed: session (the script uses unicron.Session), restart (any program, all "
		"processes start again) or auto (by the text of the script; the default); implies --unicron",
		1, 0, option_mode
	},
	{
		"unicron-spares", "COUNT",
		"[unicron] elements of the array that wait ready to replace a lost one: a whole number from 0 (default: 0); "
		"implies --unicron",
		1, 0, option_spares
	},
	{
		"unicron-preload", "MODULES",
		"[unicron] Python modules that ranks find imported when they start, with commas between (default: those that "
		"the script imports at its top); implies --unicron",
		1, 0, option_preload
	},
	SPANK_OPTIONS_TABLE_END
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

int args_check_weight(const char *text)
{
	double value;
	char *end;

	/* The character set keeps out what strtod would take besides: spaces, hexadecimal numbers, "inf" and "nan". */
	if (text[0] == '\0' || strlen(text) >= UNICRON_NUMBER_MAX || text[strspn(text, "0123456789.eE+-")] != '\0')
		return (-1);
	value = strtod(text, &end);
	return ((*end == '\0' && isfinite(value) && value > 0) ? 0 : -1);
}

/* A whole number from `least`. */
static int check_count(const char *text, long least)
{
	long value;

	if (text[0] == '\0' || strlen(text) >= UNICRON_NUMBER_MAX || text[strspn(text, "0123456789")] != '\0')
		return (-1);
	errno = 0;
	value = strtol(text, NULL, 10);
	return ((errno == 0 && value >= least && value <= INT32_MAX) ? 0 : -1);
}

int args_check_min_nodes(const char *text)
{
	return (check_count(text, 1));
}

int args_check_spares(const char *text)
{
	return (check_count(text, 0));
}

const char *args_find_mode(const char *text)
{
	for (size_t i = 0; text != NULL && i < sizeof(modes) / sizeof(*modes); ++i)
		if (strcmp(text, modes[i]) == 0)
			return (modes[i]);
	return (NULL);
}

/* `name` is how the user knows the value: an option or an environment variable. */
static int take_weight(char target[UNICRON_NUMBER_MAX], const char *name, const char *text)
{
	if (text == NULL || args_check_weight(text) < 0) {
		slurm_error("unicron: couldn't use %s=%s: write a number above 0, such as %s=2.5", name, text ? text : "", name);
		return (-1);
	}
	strcpy(target, text);
	return (0);
}

static int take_min_nodes(char target[UNICRON_NUMBER_MAX], const char *name, const char *text)
{
	if (text == NULL || args_check_min_nodes(text) < 0) {
		slurm_error("unicron: couldn't use %s=%s: write a whole number from 1, such as %s=2", name, text ? text : "",
			    name);
		return (-1);
	}
	strcpy(target, text);
	return (0);
}

static int take_spares(char target[UNICRON_NUMBER_MAX], const char *name, const char *text)
{
	if (text == NULL || args_check_spares(text) < 0) {
		slurm_error("unicron: couldn't use %s=%s: write a whole number from 0, such as %s=1", name, text ? text : "",
			    name);
		return (-1);
	}
	strcpy(target, text);
	return (0);
}

static int take_mode(const char **target, const char *name, const char *text)
{
	const char *mode = args_find_mode(text);

	if (mode == NULL) {
		slurm_error("unicron: couldn't use %s=%s: write auto, session or restart", name, text ? text : "");
		return (-1);
	}
	*target = mode;
	return (0);
}

static int take_preload(char target[UNICRON_PRELOAD_MAX], const char *name, const char *text)
{
	static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.,";

	if (text == NULL || text[0] == '\0' || strlen(text) >= UNICRON_PRELOAD_MAX || text[strspn(text, allowed)] != '\0') {
		slurm_error("unicron: couldn't use %s=%.80s: write names of modules with commas between, such as "
			    "%s=torch,megatron.core", name, text ? text : "", name);
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
static int option_weight(int val, const char *optarg, int remote)
{
	(void) val;
	return (take_weight(said.weight, "--unicron-weight", optarg) < 0 && !remote ? -1 : 0);
}

static int option_min_nodes(int val, const char *optarg, int remote)
{
	(void) val;
	return (take_min_nodes(said.min_nodes, "--unicron-min-nodes", optarg) < 0 && !remote ? -1 : 0);
}

static int option_mode(int val, const char *optarg, int remote)
{
	(void) val;
	return (take_mode(&said.mode, "--unicron-mode", optarg) < 0 && !remote ? -1 : 0);
}

static int option_spares(int val, const char *optarg, int remote)
{
	(void) val;
	return (take_spares(said.spares, "--unicron-spares", optarg) < 0 && !remote ? -1 : 0);
}

static int option_preload(int val, const char *optarg, int remote)
{
	(void) val;
	return (take_preload(said.preload, "--unicron-preload", optarg) < 0 && !remote ? -1 : 0);
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

int args_choose(spank_t sp, bool by_default, struct plugin_choice *choice)
{
	char buffer[64];
	const char *text;
	int environment, option;
	int rv = 0;

	memset(choice, 0, sizeof(*choice));
	environment = environment_switch(sp);
	if (environment == -2) {
		environment = -1;
		rv = -1;
	}
	option = option_switch(environment);

	choice->spoken = true;
	if (option >= 0)
		choice->enabled = option;
	else if (environment >= 0)
		choice->enabled = environment;
	else if (said.weight[0] != '\0' || said.min_nodes[0] != '\0' || said.mode != NULL || said.spares[0] != '\0' ||
		 said.preload[0] != '\0')
		choice->enabled = true;
	else {
		choice->enabled = by_default;
		choice->spoken = false;
	}

	strcpy(choice->weight, said.weight);
	text = job_getenv(sp, "UNICRON_WEIGHT", buffer, sizeof(buffer));
	if (choice->weight[0] == '\0' && text != NULL && take_weight(choice->weight, "UNICRON_WEIGHT", text) < 0)
		rv = -1;
	if (choice->weight[0] == '\0')
		strcpy(choice->weight, "1.0");

	strcpy(choice->min_nodes, said.min_nodes);
	text = job_getenv(sp, "UNICRON_MIN_NODES", buffer, sizeof(buffer));
	if (choice->min_nodes[0] == '\0' && text != NULL && text[0] != '\0' &&
	    take_min_nodes(choice->min_nodes, "UNICRON_MIN_NODES", text) < 0)
		rv = -1;

	choice->mode = said.mode;
	text = job_getenv(sp, "UNICRON_MODE", buffer, sizeof(buffer));
	if (choice->mode == NULL && text != NULL && text[0] != '\0' && take_mode(&choice->mode, "UNICRON_MODE", text) < 0)
		rv = -1;
	if (choice->mode == NULL)
		choice->mode = modes[0];

	strcpy(choice->spares, said.spares);
	text = job_getenv(sp, "UNICRON_SPARES", buffer, sizeof(buffer));
	if (choice->spares[0] == '\0' && text != NULL && text[0] != '\0' && take_spares(choice->spares, "UNICRON_SPARES", text) < 0)
		rv = -1;
	strcpy(choice->preload, said.preload);
	return (rv);
}

void args_reset(void)
{
	memset(&said, 0, sizeof(said));
	said.last = -1;
}
