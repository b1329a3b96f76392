/* SPDX-License-Identifier: Apache-2.0 */
/* What the plugin does for a batch script of a job that asked for Unicron, before the script begins and when it has ended. */
#ifndef UNICRON_BATCH_H
#define UNICRON_BATCH_H

#include "unicron.h"

static inline bool is_batch_step(spank_t sp)
{
	uint32_t step = 0;

	return (spank_get_item(sp, S_JOB_STEPID, &step) == ESPANK_SUCCESS && step == SLURM_BATCH_SCRIPT);
}

/* In slurmstepd, as the user: variables of the script. */
void batch_set_variables(spank_t sp);

/*
 * In the script's process, before the script, whose text it reads. That says what it may run, not what it has run. So a mark is on the
 * node from its start until one of the job's steps is protected, or has said why not. A protected step has all nodes of the job, so it
 * comes by. controller: as configured; of several clusters on one machine, as in tests, each has its own.
 */
void batch_prepare(spank_t sp, const char *controller);

/* In a step's task. */
void batch_step_came(spank_t sp, const char *controller);

/* In slurmstepd, when the script has ended. */
void batch_end(spank_t sp, const char *controller);

#endif
