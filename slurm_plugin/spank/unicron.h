/* SPDX-License-Identifier: Apache-2.0 */
/* Common to all files of the plugin: slurm/spank.h with what it needs, and the context questions that several files ask. */
#ifndef UNICRON_H
#define UNICRON_H

#include <stdbool.h>
#include <stdint.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

/* Several callbacks of one process share a decision; it lives in plugin.c and is handed down. */
struct plugin_args;
struct plugin_config;

/* A step that srun started: not the batch script, nor the external or the interactive step. */
static inline bool is_regular_step(spank_t sp)
{
	uint32_t step = 0;

	return (spank_get_item(sp, S_JOB_STEPID, &step) == ESPANK_SUCCESS && step < SLURM_MAX_NORMAL_STEP_ID);
}

#endif
