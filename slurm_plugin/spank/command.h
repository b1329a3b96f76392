/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a step's command is. The rule, which docs/user-guide.md tells users:
 *   - it TRAINS when it is Python, a launcher of ranks, or a wrapper, a container start, a shell or a script that names one;
 *   - it is a UTILITY when it is a program of the system's that trains nothing (hostname, mkdir, nvidia-smi, ...);
 *   - else it MAY train.
 * Wrappers (env, nice, timeout, numactl, ...) are looked through. Nothing is executed; a script is read.
 */
#ifndef UNICRON_COMMAND_H
#define UNICRON_COMMAND_H

#include <stdbool.h>

enum command_kind { COMMAND_UTILITY, COMMAND_MAY_TRAIN, COMMAND_TRAINS };

struct command {
	enum command_kind kind;
};

struct command command_of(char *const argv[]);

/*
 * Whether a batch script names a training and starts none with srun, nor by a script or a program of Python's that names srun.
 * word: the training's first word.
 */
bool script_trains_alone(const char *path, char word[64]);

#endif
