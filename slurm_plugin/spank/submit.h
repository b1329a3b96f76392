/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What healing needs of a job and users forget: --requeue, --open-mode=append and, of one that is no array, --no-kill. sbatch, salloc and
 * srun read the variables that stand for these options right after slurm_spank_init, before the command line, which therefore wins. In
 * sbatch they beat the script (docs/behaviour/submission.toml), so a variable whose option the script has is left alone.
 */
#ifndef UNICRON_SUBMIT_H
#define UNICRON_SUBMIT_H

#include <stdbool.h>

enum { SUBMIT_REQUEUE, SUBMIT_OPEN_MODE, SUBMIT_NO_KILL, SUBMIT_DEFAULTS = 5 };    /* the last two are salloc's and srun's --no-kill */

/* What a submission says before Slurm reads it. says: of each default, whether the user does. */
struct submission { bool asks, array, says[SUBMIT_DEFAULTS]; };

/* From slurm_spank_init, where a job is submitted: sets these options for a job that will ask for Unicron. */
void submit_set_defaults(void);

/* From slurm_spank_init_post_opt: the variables are nobody else's. asked: the job did ask. Says which options are missing. */
void submit_finish(bool asked);

/* What srun's own options say of its step, to the step's tasks. */
#define UNICRON_SAID_TASKS "_UNICRON_SAID_TASKS"              /* who said how many tasks: agent/start/agent_main.py */
#define UNICRON_SEVERAL_PROGRAMS "_UNICRON_SEVERAL_PROGRAMS"  /* --multi-prog */

/* From slurm_spank_init of srun: its environment may say how many tasks. */
void submit_read_tasks(void);

/* From slurm_spank_local_user_init. arguments: of its command, this included; its options come before them. */
void submit_say_options(int arguments);

/* The same for a command line and a script's text, or NULL. For tests. */
struct submission submit_read(char *const words[], const char *script, bool asked_before);

#endif
