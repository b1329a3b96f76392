/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kind of a step's command, by this rule, which docs/user-guide.md explains to users:
 *   - it TRAINS when it is Python, a launcher of ranks, or a wrapper, a container start, a shell or a script that names one;
 *   - it is a UTILITY when it is a program of the system's that trains nothing (hostname, mkdir, nvidia-smi, ...), or a shell
 *     that runs nothing else;
 *   - it SERVES when it is a server that trains nothing (vllm serve, jupyter lab, ...), or a shell whose commands are such a one and
 *     utilities;
 *   - it is another SHELL when it is one whose text names no training;
 *   - else it MAY train, and so does a shell that runs a front end, found by PATH: a program of Python's, or a script that trains.
 * Wrappers (env, nice, timeout, numactl, ...) are looked through. Nothing is executed; a script is read.
 */
#ifndef UNICRON_COMMAND_H
#define UNICRON_COMMAND_H

#include <stdbool.h>

enum command_kind { COMMAND_UTILITY, COMMAND_SERVES, COMMAND_MAY_TRAIN, COMMAND_SHELL, COMMAND_TRAINS };

struct command {
	enum command_kind kind;
	const char *starter;    /* the launcher in it that must not stand behind srun: of all nodes, or one that no agent replaces */
	const char *server;     /* of one that SERVES, such as "vllm serve" */
};

/* reads_text: a shell's text that runs utilities alone is a utility, for which the scripts that it names are read. */
struct command command_of(char *const argv[], bool reads_text);

/*
 * The server that the first words are; NULL for none. behind_option: the first word may be the value of an option, so that a name
 * alone says nothing.
 */
const char *command_server(char *const argv[], bool behind_option);

/* Whether a word of a shell's text is built into the shell. */
bool command_is_builtin(const char *word);

/* The PATH by which front ends in a shell's text are found: none until it is set. */
void command_set_path(const char *path);

/* The kind of a command that one word shows, as its first word or a later one. */
enum command_kind command_of_word(const char *word);

#endif
