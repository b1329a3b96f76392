/* SPDX-License-Identifier: Apache-2.0 */
#ifndef UNICRON_AGENT_H
#define UNICRON_AGENT_H

#include "unicron.h"

/*
 * Puts "AGENT run --" in front of the command of the task that is about to start. To be called from slurm_spank_task_init,
 * as the user. When that cannot be done, one line on the task's stderr says so, and the command runs unprotected.
 */
void agent_wrap(spank_t sp, const char *agent);

/* Leaves the launcher's name to agent_wrap: for tests, which have no unicron-launch beside them. */
void agent_set_launcher(const char *path);

#endif
