/* SPDX-License-Identifier: Apache-2.0 */
#ifndef UNICRON_AGENT_H
#define UNICRON_AGENT_H

#include "unicron.h"

/* From Slurm 23.11 on a plugin may put words in front of a task's command. A unit test claims it for older releases, too. */
#ifndef UNICRON_PREPENDS
#define UNICRON_PREPENDS (SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(23, 11, 0))
#elif SLURM_VERSION_NUMBER < SLURM_VERSION_NUM(23, 11, 0)
spank_err_t spank_prepend_task_argv(spank_t sp, int argc, const char *argv[]);
#endif

/* In slurmstepd, before any task: what its root is, so that agent_wrap sees that a task's is a container's. */
void agent_note_root(void);

/*
 * Puts the launcher of "AGENT run --" in front of the command of the task that is about to start. To be called from slurm_spank_task_init,
 * as the user. When that cannot be done, one line on the task's stderr says so, and the command runs unprotected. local: the task's
 * number on its node; where there are several, the first becomes the agent and the others wait for their rank (tasks.h).
 */
void agent_wrap(spank_t sp, const char *agent, uint32_t local);

/* Leaves the launcher's name to agent_wrap: for tests, which have no unicron-launch beside them. */
void agent_set_launcher(const char *path);

#endif
