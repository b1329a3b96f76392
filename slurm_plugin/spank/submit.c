/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

#include "submit.h"

#define MOST_BYTES 65536    /* of a command line, and of a script, whose options come first */
#define MOST_WORDS 1024

/*
 * An array's element that has lost a node is requeued as a whole. Not --requeue=expedite (Slurm 25.11): where the admin has not enabled it,
 * Slurm refuses the job, and elsewhere it holds a job whose script fails, instead of ending it.
 */
static const struct { const char *variable, *value, *option; bool of_allocation; } defaults[] = {
	{ "SBATCH_REQUEUE", "", "--requeue", false },
	{ "SBATCH_OPEN_MODE", "append", "--open-mode", false },
	{ "SBATCH_NO_KILL", "set", "--no-kill", true },
	{ "SALLOC_NO_KILL", "set", NULL, true },
	{ "SLURM_NO_KILL", "set", NULL, true },
};
#define DEFAULTS (sizeof(defaults) / sizeof(*defaults))

static bool mine[DEFAULTS];
static char command_line[MOST_BYTES + 1], *words[MOST_WORDS + 1];

/* The beginning of a file, as a string; false when there is none to be read. */
static bool read_text(const char *path, char text[MOST_BYTES + 1], size_t *length)
{
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	ssize_t got = -1;

	*length = 0;
	if (fd < 0)
		return (false);
	while (*length < MOST_BYTES && (got = read(fd, text + *length, MOST_BYTES - *length)) > 0)
		*length += (size_t) got;
	close(fd);
	text[*length] = '\0';
	return (*length > 0);
}

static void read_words(void)
{
	size_t length, count = 0;

	if (!read_text("/proc/self/cmdline", command_line, &length))
		return;
	for (char *word = command_line; word < command_line + length && count < MOST_WORDS; word += strlen(word) + 1)
		words[count++] = word;
	words[count] = NULL;
}

/* 1 for an option that asks for Unicron, 0 for --no-unicron, else -1. */
static int asks(const char *word)
{
	if (strcmp(word, "--no-unicron") == 0)
		return (0);
	return (strncmp(word, "--unicron", 9) == 0 && (word[9] == '\0' || word[9] == '-') ? 1 : -1);
}

static bool is_array(const char *word)
{
	return (strncmp(word, "--array", 7) == 0 || strncmp(word, "-a", 2) == 0);
}

/* The options of a script's #SBATCH lines, up to its first command. */
static void read_script_options(const char *script, bool *asked, bool *array)
{
	while (*script != '\0') {
		size_t length = strcspn(script, "\n");
		char line[1024], *rest, *word;

		if (script[strspn(script, " \t\r")] != '#' && strspn(script, " \t\r") < length)
			return;
		if (strncmp(script, "#SBATCH", 7) == 0) {
			snprintf(line, sizeof(line), "%.*s", (int) length, script);
			strtok_r(line, " \t\r", &rest);
			while ((word = strtok_r(NULL, " \t\r", &rest)) != NULL && word[0] != '#') {
				if (asks(word) >= 0)
					*asked = asks(word);
				*array = *array || is_array(word);
			}
		}
		script += length + (script[length] == '\n');
	}
}

bool submit_asks(char *const command[], const char *script, bool asked_before, bool *array)
{
	bool asked = asked_before;

	*array = getenv("SBATCH_ARRAY_INX") != NULL;
	if (script != NULL)
		read_script_options(script, &asked, array);
	for (int i = 1; command[0] != NULL && command[i] != NULL && strcmp(command[i], "--") != 0; ++i) {
		if (asks(command[i]) >= 0)
			asked = asks(command[i]);
		*array = *array || is_array(command[i]);
	}
	return (asked);
}

/*
 * sbatch's script: its first word that names one, or what its standard input is. False for one that comes by a pipe. The words behind
 * it are the script's.
 */
static bool read_script(char text[MOST_BYTES + 1])
{
	size_t length;
	struct stat about;

	for (int i = 1; words[0] != NULL && words[i] != NULL; ++i)
		if (words[i][0] != '-' && stat(words[i], &about) == 0 && S_ISREG(about.st_mode) &&
		    read_text(words[i], text, &length) && strncmp(text, "#!", 2) == 0) {
			words[i + 1] = NULL;
			return (true);
		}
	return (fstat(STDIN_FILENO, &about) == 0 && S_ISREG(about.st_mode) && read_text("/proc/self/fd/0", text, &length));
}

void submit_set_defaults(void)
{
	const char *said = getenv("UNICRON"), *by_default = getenv("UNICRON_BY_DEFAULT");
	bool script, array, before = said != NULL && strcmp(said, "1") == 0 && !(by_default != NULL && strcmp(by_default, "1") == 0);
	static char text[MOST_BYTES + 1];

	read_words();
	script = read_script(text);
	if (!submit_asks(words, script ? text : NULL, before, &array))
		return;
	for (size_t i = 0; i < DEFAULTS; ++i)
		mine[i] = !(array && defaults[i].of_allocation) && getenv(defaults[i].variable) == NULL && setenv(defaults[i].variable, defaults[i].value, 1) == 0;
}

static bool is_said(const char *option)
{
	for (int i = 1; words[0] != NULL && words[i] != NULL; ++i)
		if (strncmp(words[i], option, strlen(option)) == 0)
			return (true);
	return (false);
}

void submit_finish(bool asked)
{
	char missing[128] = "";
	bool any = false, array;

	for (size_t i = 0; i < DEFAULTS; ++i) {
		if (mine[i])
			unsetenv(defaults[i].variable);
		any = any || mine[i];
	}
	if (!asked || any || words[0] == NULL || strstr(words[0], "sbatch") == NULL)
		return;
	submit_asks(words, NULL, false, &array);
	for (size_t i = 0; i < DEFAULTS; ++i)
		if (defaults[i].option != NULL && getenv(defaults[i].variable) == NULL && !is_said(defaults[i].option) &&
		    !(array && defaults[i].of_allocation))
			snprintf(missing + strlen(missing), sizeof(missing) - strlen(missing), " %s%s", defaults[i].option,
				 strcmp(defaults[i].option, "--open-mode") == 0 ? "=append" :
				 defaults[i].of_allocation ? " (but for an array)" : "");
	if (missing[0] != '\0')
		slurm_spank_log("unicron: couldn't read the script before sbatch did: if it doesn't have these options, a lost node ends "
				"the job, or its log is written over; give sbatch%s", missing);
}

/* What says how many tasks a node has: an option of srun's, by its beginning, and the variable that stands for sbatch's. */
static const struct { const char *option, *variable; } of_tasks[] = {
	{ "-n", "SLURM_NTASKS" },
	{ "--nt", "SLURM_NTASKS_PER_NODE" },
	{ "--gpus-per-t", "SLURM_GPUS_PER_TASK" },
	{ NULL, "SLURM_NPROCS" },
	{ NULL, "SLURM_NTASKS_PER_GPU" },
};
#define OF_TASKS (sizeof(of_tasks) / sizeof(*of_tasks))

static char said_before[64];    /* NAME=VALUE, before srun sets the variables of its own step */

void submit_read_tasks(void)
{
	for (size_t i = 0; i < OF_TASKS; ++i)
		if (said_before[0] == '\0' && getenv(of_tasks[i].variable) != NULL)
			snprintf(said_before, sizeof(said_before), "%s=%s", of_tasks[i].variable, getenv(of_tasks[i].variable));
}

void submit_say_options(int arguments)
{
	int count = 0;

	unsetenv(UNICRON_SAID_TASKS);
	unsetenv(UNICRON_SEVERAL_PROGRAMS);
	if (said_before[0] != '\0')
		setenv(UNICRON_SAID_TASKS, said_before, 1);
	while (words[count] != NULL)
		++count;
	for (int i = 1; i <= count - arguments; ++i) {    /* the command itself, too: with --multi-prog srun counts one more */
		if (strcmp(words[i], "--multi-prog") == 0)
			setenv(UNICRON_SEVERAL_PROGRAMS, "1", 1);
		for (size_t j = 0; j < OF_TASKS; ++j)
			if (of_tasks[j].option != NULL && strncmp(words[i], of_tasks[j].option, strlen(of_tasks[j].option)) == 0)
				setenv(UNICRON_SAID_TASKS, words[i], 1);
	}
}
