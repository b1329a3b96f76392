/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which steps get an agent: those that train, on each node of the job, with one task on a node or as many as it is to have ranks.
 * The others run untouched.
 */
#ifndef UNICRON_STEP_H
#define UNICRON_STEP_H

#include "command.h"
#include "unicron.h"

#define UNICRON_REASON_MAX 256

struct step {
	struct command command;
	int64_t tasks;        /* the most on one node */
	int64_t fewest;       /* ... and the fewest */
	int64_t nodes;        /* of this step */
	int64_t job_nodes;    /* of its allocation */
	int64_t ranks;        /* UNICRON_RANKS_PER_NODE, 0 when it is not set */
	bool container;       /* srun --container: the task's root is another one */
	bool hetero;          /* of a heterogeneous job */
	bool programs;        /* srun --multi-prog */
};

enum step_verdict {
	STEP_UNJUDGED,
	STEP_PROTECTED,
	STEP_UNTOUCHED,       /* nobody meant it to be protected */
	STEP_UNPROTECTED,     /* somebody may have meant it: `reason` says why it is not */
};

/* Pure. asked: the user said --unicron in some way; else the administrator's default=on did. */
enum step_verdict step_judge(const struct step *step, bool asked, char reason[UNICRON_REASON_MAX]);

/* What Slurm tells of the step at hand, and its command's script: in the task's own process, as the user. */
void step_read(spank_t sp, struct step *step);

#endif
