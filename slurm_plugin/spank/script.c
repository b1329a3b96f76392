/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "script.h"
#include "shell_text.h"

static void note_word(char kept[64], const char *word)
{
	if (kept[0] == '\0')
		snprintf(kept, 64, "%.60s", word);
}

static void hear_element(struct script *script, const char *text, const char *name)
{
	if (strstr(text, "SLURM_ARRAY_TASK_ID") != NULL)
		note_word(script->sweep, name);
}

/* A file that a command of the batch script names. */
static void hear_file(struct script *script, const char *path)
{
	char *text = read_beginning(path);

	if (text == NULL)
		return;
	script->step = script->step || strstr(text, "srun") != NULL || strstr(text, "unicron-agent") != NULL;
	hear_element(script, text, base_name(path));
	free(text);
}

/* An option of srun's may have the next word for itself, so the command is the first word behind that, or a utility before it. */
static bool is_training_step(char *const words[])
{
	for (int i = 0; words[i] != NULL; ++i) {
		bool is_value = i > 0 && words[i - 1][0] == '-' && strchr(words[i - 1], '=') == NULL;
		enum command_kind kind = command_of_word(words[i]);

		if (kind != COMMAND_MAY_TRAIN)
			return (kind != COMMAND_UTILITY);
		if (words[i][0] != '-' && !is_value)
			return (true);
	}
	return (true);
}

static void hear_batch_command(struct script *script, char *const words[])
{
	bool step = false;

	for (int i = 0; words[i] != NULL && !step; ++i) {
		step = strcmp(base_name(words[i]), "srun") == 0;
		if (step ? is_training_step(words + i + 1) : strcmp(base_name(words[i]), "unicron-agent") == 0)
			script->step = true;
	}
	for (int i = 0; words[i] != NULL; ++i)
		hear_file(script, words[i]);
	if (!step && command_of(words, false).kind == COMMAND_TRAINS)
		note_word(script->word, words[0]);
}

bool script_read(const char *path, struct script *script)
{
	char *text = read_beginning(path), *words[MOST_WORDS + 1], *rest = NULL, *line;
	int count;

	memset(script, 0, sizeof(*script));
	if (text == NULL)
		return (false);
	line = strndup(text, strcspn(text, "\n"));
	if (line != NULL && strncmp(line, "#!", 2) == 0 && strstr(line, "python") != NULL) {
		hear_file(script, path);
		note_word(script->word, "python");
	} else {
		blank_comments(text);
		hear_element(script, text, "its batch script");
		blank_syntax(text);
		for (count = next_command(text, &rest, words); count >= 0; count = next_command(NULL, &rest, words))
			if (count > 0)
				hear_batch_command(script, words);
	}
	free(line);
	free(text);
	return (true);
}
