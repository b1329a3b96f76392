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
static const struct {
	const char *variable, *value, *option, *opposite, *opposite_variable;
	bool of_allocation;
} defaults[SUBMIT_DEFAULTS] = {
	{ "SBATCH_REQUEUE", "", "--requeue", "--no-requeue", "SBATCH_NO_REQUEUE", false },
	{ "SBATCH_OPEN_MODE", "append", "--open-mode", NULL, NULL, false },
	{ "SBATCH_NO_KILL", "set", "--no-kill", NULL, NULL, true },
	{ "SALLOC_NO_KILL", "set", NULL, NULL, NULL, true },
	{ "SLURM_NO_KILL", "set", NULL, NULL, NULL, true },
};

static bool mine[SUBMIT_DEFAULTS], was_asked;
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

/* Whether a word is this long option, whole or cut short, or this letter, perhaps behind letters that stand for themselves. */
static bool is_option(const char *word, const char *option, char letter)
{
	size_t length = strcspn(word, "=");

	if (option != NULL && length > 3 && strncmp(word, option, length) == 0)
		return (true);
	return (letter != '\0' && word[0] == '-' && word[1 + strspn(word + 1, "bhHOQsuvVW")] == letter);
}

static void note_word(struct submission *job, const char *word)
{
	if (is_option(word, "--no-unicron", '\0'))
		job->asks = false;
	else if (strncmp(word, "--unicron", 9) == 0 && (word[9] == '\0' || word[9] == '-'))
		job->asks = true;
	job->array = job->array || is_option(word, "--array", 'a');
	for (size_t i = 0; i < SUBMIT_DEFAULTS; ++i)
		job->says[i] = job->says[i] || is_option(word, defaults[i].opposite, '\0') ||
			       is_option(word, defaults[i].option, i == SUBMIT_NO_KILL ? 'k' : '\0');
}

/* The next word of an #SBATCH line, as sbatch reads it: no quotes, and nothing behind a # outside of them. Its end may be cut off. */
static bool next_word(const char **at, const char *end, char word[64])
{
	char quote = '\0';
	size_t length = 0;

	while (*at < end && isspace((unsigned char) **at))
		++*at;
	if (*at == end || **at == '#')
		return (false);
	for (; *at < end && (quote != '\0' || !(isspace((unsigned char) **at) || **at == '#')); ++*at) {
		if (**at == quote || (quote == '\0' && strchr("\"'", **at) != NULL)) {
			quote = quote == '\0' ? **at : '\0';
			continue;
		}
		if (**at == '\\' && *at + 1 < end)
			++*at;
		if (length < 63)
			word[length++] = **at;
	}
	word[length] = '\0';
	return (true);
}

/* The options of a script's #SBATCH lines, up to its first command. */
static void read_script_options(const char *script, struct submission *job)
{
	char word[64];

	while (*script != '\0') {
		size_t length = strcspn(script, "\n"), blanks = strspn(script, " \t\r\f\v");
		const char *at = script + strlen("#SBATCH");

		if (script[blanks] != '#' && blanks < length)
			return;
		if (strncmp(script, "#SBATCH", strlen("#SBATCH")) == 0)
			while (next_word(&at, script + length, word))
				note_word(job, word);
		script += length + (script[length] == '\n');
	}
}

struct submission submit_read(char *const command[], const char *script, bool asked_before)
{
	struct submission job = { .asks = asked_before, .array = getenv("SBATCH_ARRAY_INX") != NULL };

	if (script != NULL)
		read_script_options(script, &job);
	for (int i = 1; command[0] != NULL && command[i] != NULL && strcmp(command[i], "--") != 0; ++i)
		note_word(&job, command[i]);
	return (job);
}

/* Whether it is left to what the user said. sbatch itself takes a variable before what the script says, and before its opposite. */
static bool is_said(const struct submission *job, size_t which)
{
	return (job->says[which] || (job->array && defaults[which].of_allocation) || getenv(defaults[which].variable) != NULL ||
		(defaults[which].opposite_variable != NULL && getenv(defaults[which].opposite_variable) != NULL));
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
	bool before = said != NULL && strcmp(said, "1") == 0 && !(by_default != NULL && strcmp(by_default, "1") == 0);
	static char text[MOST_BYTES + 1];
	struct submission job;

	read_words();
	job = submit_read(words, read_script(text) ? text : NULL, before);
	was_asked = job.asks;
	for (size_t i = 0; job.asks && i < SUBMIT_DEFAULTS; ++i)
		mine[i] = !is_said(&job, i) && setenv(defaults[i].variable, defaults[i].value, 1) == 0;
}

void submit_finish(bool asked)
{
	char missing[128] = "";
	struct submission job;

	for (size_t i = 0; i < SUBMIT_DEFAULTS; ++i)
		if (mine[i])
			unsetenv(defaults[i].variable);
	if (!asked || was_asked || words[0] == NULL || strstr(words[0], "sbatch") == NULL)
		return;
	job = submit_read(words, NULL, false);
	for (size_t i = 0; i < SUBMIT_DEFAULTS; ++i)
		if (defaults[i].option != NULL && !is_said(&job, i))
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
