/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What healing needs of a job and users forget: --requeue, --open-mode=append and, of one that is no array, --no-kill. sbatch, salloc and srun read the variables
 * that stand for these options right after slurm_spank_init, before the script and the command line, which therefore win.
 */
#ifndef UNICRON_SUBMIT_H
#define UNICRON_SUBMIT_H

#include <stdbool.h>

/* From slurm_spank_init, where a job is submitted: sets these options for a job that will ask for Unicron. */
void submit_set_defaults(void);

/* From slurm_spank_init_post_opt: the variables are nobody else's. asked: the job did ask. Says which options are missing. */
void submit_finish(bool asked);

/* What srun's own options say of its step, to the step's tasks. */
#define UNICRON_SAID_TASKS "_UNICRON_SAID_TASKS"              /* who said how many tasks: agent/start/rank_count.py */
#define UNICRON_SEVERAL_PROGRAMS "_UNICRON_SEVERAL_PROGRAMS"  /* --multi-prog */

/* From slurm_spank_init of srun: its environment may say how many tasks. */
void submit_read_tasks(void);

/* From slurm_spank_local_user_init. arguments: of its command, this included; its options come before them. */
void submit_say_options(int arguments);

/* The same for a command line and a script's text, or NULL: does it ask for Unicron, and for an array? For tests. */
bool submit_asks(char *const words[], const char *script, bool asked_before, bool *array);

#endif
