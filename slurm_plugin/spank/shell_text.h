/* SPDX-License-Identifier: Apache-2.0 */
/* Words of a command, and the commands of a shell's text, for command.c and script.c. Nothing is executed. */
#ifndef UNICRON_SHELL_TEXT_H
#define UNICRON_SHELL_TEXT_H

#include <stdbool.h>
#include <stddef.h>

#define MOST_WORDS 64    /* of one command in a text */

#define IS_ONE_OF(word, list) is_one_of(word, list, sizeof(list) / sizeof((list)[0]))

bool is_one_of(const char *word, const char *const *list, size_t count);
const char *base_name(const char *path);
bool ends_with(const char *word, const char *end);

/*
 * The beginning of a file, to be freed; NULL when it is no ordinary file that can be read. A user chooses how many files a text names
 * and how large they are: from reading_begin() on only so many are opened, and so many bytes of all of them are read. reading_is_cut():
 * whether there was more.
 */
char *read_beginning(const char *path);
void reading_begin(void);
bool reading_is_cut(void);

/* Comments, and the ends of lines that go on in the next, become blanks. */
void blank_comments(char *text);

/* ${...} becomes a word, and the & of redirections a blank. */
void blank_syntax(char *text);

/* The next command of a shell's text, as strtok_r has it; -1 at the end. Quotes and settings are not kept. */
int next_command(char *text, char **rest, char *words[MOST_WORDS + 1]);

#endif
