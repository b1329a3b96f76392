/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a step's command is. The rule, which docs/user-guide.md tells users:
 *   - it TRAINS when it is Python, a launcher of ranks, or a wrapper, a container start, a shell or a script that names one;
 *   - it is a UTILITY when it is a program of the system's that trains nothing (hostname, mkdir, nvidia-smi, ...), or a shell
 *     that runs nothing else;
 *   - it is another SHELL when it is one whose text names no training;
 *   - else it MAY train.
 * Wrappers (env, nice, timeout, numactl, ...) are looked through. Nothing is executed; a script is read.
 */
#ifndef UNICRON_COMMAND_H
#define UNICRON_COMMAND_H

#include <stdbool.h>

enum command_kind { COMMAND_UTILITY, COMMAND_MAY_TRAIN, COMMAND_SHELL, COMMAND_TRAINS };

struct command {
	enum command_kind kind;
};

struct command command_of(char *const argv[]);

/* What a batch script, with the files that its commands name, says. */
struct script {
	bool step;          /* an srun that may train, or something that may call one */
	char word[64];      /* of the first training without srun; empty for none */
	char sweep[64];     /* what names SLURM_ARRAY_TASK_ID; empty for nothing */
};

/* False where there is none to be read. */
bool script_read(const char *path, struct script *script);

#endif
