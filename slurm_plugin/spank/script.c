/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "script.h"
#include "shell_text.h"

#define MOST_NAMES 256    /* that are known as read; a name behind them may be read again */

struct names { const char *names[MOST_NAMES]; int count; };

static void note_word(char kept[64], const char *word)
{
	if (kept[0] == '\0')
		snprintf(kept, 64, "%.60s", word);
}

static void scan_names(struct script *script, const char *text, const char *name)
{
	if (strstr(text, "SLURM_ARRAY_TASK_ID") != NULL)
		note_word(script->sweep, name);
	script->agent = script->agent || strstr(text, "unicron-agent") != NULL;
}

/* An option of srun's may have the next word for itself, so the command is the first word behind that, or a utility before it. */
static bool is_training_step(struct script *script, char *const words[])
{
	for (int i = 0; words[i] != NULL; ++i) {
		bool is_value = i > 0 && words[i - 1][0] == '-' && strchr(words[i - 1], '=') == NULL;
		enum command_kind kind = command_of_word(words[i]);
		const char *server = command_server(words + i, is_value);

		if (server == NULL && (words[i][0] != '-' && !is_value))
			server = command_of(words + i, true).server;
		if (server != NULL) {
			note_word(script->server, server);
			return (false);
		}
		if (kind != COMMAND_MAY_TRAIN)
			return (kind != COMMAND_UTILITY);
		if (words[i][0] != '-' && !is_value)
			return (true);
	}
	return (true);
}

/* Whether a variable may stand for srun: SRUN=srun, LAUNCH="/usr/bin/srun -n 2", $SRUN; not so HOST=$(srun hostname). */
static bool names_variable(const char *text)
{
	const char *begin = text;    /* of the name that goes on at `at` */

	for (const char *at = text; *at != '\0'; ++at) {
		if (!isalnum((unsigned char) *at) && strchr("_/.\"'", *at) == NULL)
			begin = at + 1;
		else if (begin > text && strchr("=${", begin[-1]) != NULL && strncasecmp(at, "srun", 4) == 0)
			return (true);
	}
	return (false);
}

/*
 * Whether a command starts a step that may train. A program of the system's runs none of its arguments. may_mean: in this text a
 * variable may stand for srun.
 */
static bool starts_step(struct script *script, char *const words[], bool may_mean)
{
	if (command_of_word(words[0]) == COMMAND_UTILITY)
		return (false);
	if (may_mean && words[0][0] == '$')
		return (true);
	for (int i = 0; words[i] != NULL; ++i)
		if (strcmp(base_name(words[i]), "srun") == 0)
			return (is_training_step(script, words + i + 1));
		else if (strcmp(base_name(words[i]), "unicron-agent") == 0)
			return (true);
	return (false);
}

/* Whether a text of Python's runs other programs, and does not train by itself: any of them may be srun. */
static bool is_python_launcher(const char *text)
{
	static const char *const runs[] = { "subprocess", "os.system", "popen", "os.exec", "os.spawn", "posix_spawn", "pexpect", "submitit" };
	static const char *const trains[] = { "torch", "jax", "tensorflow", "lightning", "transformers" };

	for (size_t i = 0; i < sizeof(trains) / sizeof(*trains); ++i)
		if (strstr(text, trains[i]) != NULL)
			return (false);
	for (size_t i = 0; i < sizeof(runs) / sizeof(*runs); ++i)
		if (strstr(text, runs[i]) != NULL)
			return (true);
	return (false);
}

/* Whether a text of Python's may start a step. Comments and texts between three quotes do not count. */
static bool python_starts_step(char *text)
{
	char *end;

	blank_comments(text);
	for (char *at = text; (at = strstr(at, "\"\"\"")) != NULL && (end = strstr(at + 3, "\"\"\"")) != NULL; at = end + 3)
		memset(at, ' ', (size_t) (end + 3 - at));
	return (strstr(text, "srun") != NULL || strstr(text, "unicron-agent") != NULL || is_python_launcher(text));
}

static bool is_python_text(const char *path, const char *text)
{
	const char *name = strstr(text, "python");

	return (ends_with(path, ".py") || (strncmp(text, "#!", 2) == 0 && name != NULL && name < text + strcspn(text, "\n")));
}

/* A file that a command of the batch script names. */
static void scan_file(struct script *script, const char *path)
{
	char *text = read_beginning(path), *words[MOST_WORDS + 1], *rest = NULL;
	bool may_mean;
	int count;

	if (text == NULL)
		return;
	scan_names(script, text, base_name(path));
	if (is_python_text(path, text)) {
		script->step = script->step || python_starts_step(text);
	} else {
		blank_comments(text);
		may_mean = names_variable(text);
		blank_syntax(text);
		for (count = next_command(text, &rest, words); count >= 0; count = next_command(NULL, &rest, words))
			script->step = script->step || (count > 0 && starts_step(script, words, may_mean));
	}
	free(text);
}

/* Whether a word may name a file that has not been read yet. The names point to the words. */
static bool is_new_name(struct names *seen, const char *word)
{
	if (strchr("-$", word[0]) != NULL || word[strspn(word, "0123456789")] == '\0')
		return (false);
	for (int i = 0; i < seen->count; ++i)
		if (strcmp(seen->names[i], word) == 0)
			return (false);
	if (seen->count < MOST_NAMES)
		seen->names[seen->count++] = word;
	return (true);
}

static void scan_batch_command(struct script *script, char *const words[], bool may_mean, struct names *seen)
{
	struct command command;
	char sourced[64];
	bool step = false;

	script->step = script->step || starts_step(script, words, may_mean);
	for (int i = 0; words[i] != NULL; ++i) {
		step = step || strcmp(base_name(words[i]), "srun") == 0;
		if (is_new_name(seen, words[i]))
			scan_file(script, words[i]);
	}
	if (script->step || step)
		return;
	command = command_of(words, true);
	if (command.kind == COMMAND_MAY_TRAIN && !command_is_builtin(words[0]))
		script->unknown = true;    /* it may run anything */
	if (command.server != NULL)
		note_word(script->server, command.server);
	if (command.kind == COMMAND_TRAINS && command.starter != NULL)
		note_word(script->starter, command.starter);
	if (script->word[0] != '\0' || command.kind != COMMAND_TRAINS)
		return;
	snprintf(sourced, sizeof(sourced), "bash %.50s", words[1] != NULL ? words[1] : "");
	note_word(script->word, strcmp(words[0], "source") == 0 || strcmp(words[0], ".") == 0 ? sourced : words[0]);
}

bool script_read(const char *path, struct script *script)
{
	char *text, *words[MOST_WORDS + 1], *rest = NULL;
	struct names seen = { .count = 0 };
	bool may_mean;
	int count;

	memset(script, 0, sizeof(*script));
	reading_begin();
	text = read_beginning(path);
	if (text == NULL)
		return (false);
	if (is_python_text("", text)) {
		scan_file(script, path);
		note_word(script->word, "python");
	} else {
		blank_comments(text);
		scan_names(script, text, "its batch script");
		may_mean = names_variable(text);
		blank_syntax(text);
		for (count = next_command(text, &rest, words); count >= 0; count = next_command(NULL, &rest, words))
			if (count > 0)
				scan_batch_command(script, words, may_mean, &seen);
	}
	free(text);
	script->cut = reading_is_cut();
	/* Where no step comes of that, it is said at the script's end. */
	script->step = script->step || (script->unknown && !script->cut && script->word[0] == '\0' && script->server[0] == '\0');
	return (true);
}
