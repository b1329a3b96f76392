/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shell_text.h"
#include "step.h"
#include "submit.h"

static bool read_number(spank_t sp, const char *name, int64_t *value)
{
	char text[32], *end;
	int64_t number;

	if (spank_getenv(sp, name, text, sizeof(text)) != ESPANK_SUCCESS)
		return (false);
	number = strtoll(text, &end, 10);
	if (end == text || *end != '\0' || number < 0)
		return (false);
	*value = number;
	return (true);
}

/* The most and the fewest of Slurm's "2(x3),1". */
static void read_tasks(const char *text, struct step *step)
{
	while (text != NULL) {
		int64_t count = strtoll(text, NULL, 10);

		if (count > step->tasks)
			step->tasks = count;
		if (count > 0 && (step->fewest == 0 || count < step->fewest))
			step->fewest = count;
		text = strchr(text, ',');
		text = text != NULL ? text + 1 : NULL;
	}
}

void step_read(spank_t sp, struct step *step)
{
	char text[4096];
	uint32_t here = 0;
	int argc = 0;
	spank_err_t rc;
	char **argv = NULL;

	memset(step, 0, sizeof(*step));
	step->command.kind = COMMAND_MAY_TRAIN;
	reading_begin();
	command_set_path(spank_getenv(sp, "PATH", text, sizeof(text)) == ESPANK_SUCCESS ? text : NULL);
	if (spank_get_item(sp, S_JOB_ARGV, &argc, &argv) == ESPANK_SUCCESS && argc > 0 && argv != NULL)
		step->command = command_of(argv, true);
	/* Text that was not read may train: the agent decides. */
	if (reading_is_cut() && step->command.kind != COMMAND_TRAINS)
		step->command.kind = COMMAND_MAY_TRAIN;
	step->tasks = 1;
	/* A list that was cut short still tells of its beginning, and this node's own count is known in any case. */
	rc = spank_getenv(sp, "SLURM_STEP_TASKS_PER_NODE", text, sizeof(text));
	if (rc == ESPANK_SUCCESS || rc == ESPANK_NOSPACE)
		read_tasks(text, step);
	if (spank_get_item(sp, S_JOB_LOCAL_TASK_COUNT, &here) == ESPANK_SUCCESS && here > step->tasks)
		step->tasks = here;
	if (step->fewest == 0)
		step->fewest = step->tasks;
	step->nodes = step->job_nodes = 1;
	read_number(sp, "SLURM_STEP_NUM_NODES", &step->nodes);
	if (!read_number(sp, "SLURM_JOB_NUM_NODES", &step->job_nodes))
		step->job_nodes = step->nodes;
	read_number(sp, "UNICRON_RANKS_PER_NODE", &step->ranks);
	step->hetero = spank_getenv(sp, "SLURM_HET_SIZE", text, sizeof(text)) == ESPANK_SUCCESS;
	step->programs = spank_getenv(sp, UNICRON_SEVERAL_PROGRAMS, text, sizeof(text)) == ESPANK_SUCCESS;
	step->container = spank_getenv(sp, "SLURM_CONTAINER", text, sizeof(text)) == ESPANK_SUCCESS && text[0] != '\0';
}

/* Why the tasks of a node cannot be its ranks. */
static bool why_no_ranks(const struct step *step, char reason[UNICRON_REASON_MAX])
{
	if (step->command.kind != COMMAND_TRAINS)
		snprintf(reason, UNICRON_REASON_MAX, "it has %" PRId64 " tasks on a node, as programs of MPI have, and its command names no "
			 "Python: give it one (--ntasks-per-node=1) if it trains", step->tasks);
	else if (step->fewest != step->tasks)
		snprintf(reason, UNICRON_REASON_MAX, "it has %" PRId64 " tasks on one node and %" PRId64 " on another: give each as many "
			 "(--ntasks-per-node=%" PRId64 ")", step->tasks, step->fewest, step->tasks);
	else if (step->ranks > 0 && step->ranks != step->tasks)
		snprintf(reason, UNICRON_REASON_MAX, "UNICRON_RANKS_PER_NODE is %" PRId64 ", and it has %" PRId64 " tasks on a node: unset it",
			 step->ranks, step->tasks);
	else
		return (false);
	return (true);
}

enum step_verdict step_judge(const struct step *step, bool asked, char reason[UNICRON_REASON_MAX])
{
	reason[0] = '\0';
	if (step->command.kind == COMMAND_UTILITY || step->command.kind == COMMAND_SERVES)
		return (STEP_UNTOUCHED);
	/* By default an agent changes nothing that MPI may need. */
	if (!asked && (step->command.kind != COMMAND_TRAINS || step->tasks > 1))
		return (STEP_UNTOUCHED);
	if (step->programs)
		snprintf(reason, UNICRON_REASON_MAX, "it has several programs (--multi-prog), and a training is one: srun each by itself");
	else if (step->tasks > 1 && why_no_ranks(step, reason))
		return (STEP_UNPROTECTED);
	else if (step->command.kind == COMMAND_SHELL)
		snprintf(reason, UNICRON_REASON_MAX, "its shell text names no Python and no launcher: if it trains, srun the program that does");
	else if (step->hetero)
		snprintf(reason, UNICRON_REASON_MAX, "its job is heterogeneous, and each component is a job of its own: "
			 "submit one job, such as sbatch -N 4, in place of components");
	else if (step->container)
		snprintf(reason, UNICRON_REASON_MAX, "Slurm starts its container (--container) around the agent, too, where none is: "
			 "start the container in the command (srun apptainer exec ...), or by pyxis");
	else if (step->nodes < step->job_nodes)
		snprintf(reason, UNICRON_REASON_MAX, "it has %" PRId64 " of the job's %" PRId64 " nodes: a training has all of them",
			 step->nodes, step->job_nodes);
	else
		return (STEP_PROTECTED);
	return (asked ? STEP_UNPROTECTED : STEP_UNTOUCHED);
}
