/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tasks of a node become the ranks of one agent (srun --ntasks-per-node=8): the node's first task is the agent, each other one
 * waits for its rank. A socket pair for each of them joins the two. slurmstepd makes them before it forks the tasks, which inherit
 * them: no name is needed that another user could take, and each side sees at once that the other has ended.
 */
#ifndef UNICRON_TASKS_H
#define UNICRON_TASKS_H

#include "unicron.h"

/* In slurmstepd, before the tasks: pairs for `count` tasks. 0, or -1 when there are not enough descriptors. */
int tasks_open(uint32_t count);

/* In slurmstepd, once for each task, when all are forked; with the last call the pairs are the tasks' alone. */
void tasks_forked(void);

/* In the task `local`, before its command: its ends stay open, and unicron-launch finds them. 0, or -1 when Slurm refuses. */
int tasks_keep(spank_t sp, uint32_t local);

#endif
