/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unicron.so: dispatch. Every callback returns 0, whatever happens: a SPANK plugin that fails on a compute node drains it.
 * Only the options' own callbacks (args.c) and a bad variable where a job is submitted refuse anything.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "agent.h"
#include "args.h"
#include "batch.h"
#include "config.h"
#include "inherit.h"
#include "notify.h"
#include "step.h"
#include "submit.h"
#include "tasks.h"
#include "unicron.h"

#pragma GCC visibility push(default)
SPANK_PLUGIN(unicron, 1)
extern const char plugin_release[];
/* `unicronctl doctor` and the package's scripts read this text in the file: strings unicron.so | grep "built for". */
const char plugin_release[] = "unicron " UNICRON_VERSION ", built for Slurm " UNICRON_SLURM_RELEASE;
#pragma GCC visibility pop

#define CALLBACK __attribute__((visibility("default"))) int

static struct plugin_config config;
static enum { UNREAD, USABLE, UNUSABLE } config_state = UNREAD;
static struct plugin_choice choice;
static int unshared = STEP_UNJUDGED, *agreed = &unshared;    /* the verdict of a regular step; its tasks and slurmstepd share it */
static char reason[UNICRON_REASON_MAX];
static bool tasks_failed;
static bool submitter_asked;           /* this submission comes from a job that asked for Unicron */

/* The arguments are read once, by the first entry point that asks. */
static bool usable(int ac, char **av)
{
	if (config_state == UNREAD)
		config_state = config_parse(&config, ac, av) < 0 ? UNUSABLE : USABLE;
	return (config_state == USABLE);
}

CALLBACK slurm_spank_init(spank_t sp, int ac, char **av)
{
	spank_context_t context = spank_context();

	if (context == S_CTX_ALLOCATOR)
		submitter_asked = inherit_forget();
	if (context == S_CTX_REMOTE)
		agent_note_root();
	/* Registered also when the configuration is unusable: srun --unicron then still runs, unprotected. */
	if (context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR || context == S_CTX_REMOTE)
		args_register(sp);
	if (context != S_CTX_SLURMD && usable(ac, av) && (context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR))
		submit_set_defaults();
	if (context == S_CTX_LOCAL)
		submit_read_tasks();
	return (0);
}

/*
 * What the user said goes into the environment of the job and of its steps: of this process where sp is NULL. The default decides again
 * there.
 */
static void hand_on(spank_t sp)
{
	inherit_set(sp, "UNICRON", choice.enabled ? "1" : "0");
	for (enum args_value which = 0; choice.enabled && which < ARGS_VALUES; ++which)
		if (choice.values[which][0] != '\0')
			inherit_set(sp, args_variable(which), choice.values[which]);
}

/* Here, for slurmd's contain_spank runs the later callbacks in a process whose descriptors the tasks do not inherit. */
static void join_tasks(spank_t sp)
{
	uint32_t tasks = 0;
	void *page = mmap(NULL, sizeof(*agreed), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (page != MAP_FAILED)
		agreed = page;
	if (choice.spoken && spank_get_item(sp, S_JOB_LOCAL_TASK_COUNT, &tasks) == ESPANK_SUCCESS && tasks > 1)
		tasks_failed = tasks_open(tasks) < 0;
}

CALLBACK slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
	char address[UNICRON_ADDRESS_MAX];
	spank_context_t context = spank_context();
	int ret;

	if (!usable(ac, av))
		return (0);
	ret = args_choose(sp, config.by_default, &choice);

	if (context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR) {
		/*
		 * The return value of an "optional" plugin counts for nothing, but a job must not run with another weight
		 * than the one meant. Nothing has been submitted yet, so leaving is safe.
		 */
		if (ret < 0)
			exit(EXIT_FAILURE);
		submit_finish(choice.spoken && choice.enabled);
		if (choice.spoken)
			hand_on(NULL);
		else if (submitter_asked && !choice.enabled)
			slurm_spank_log("unicron: nothing protects the new job, for --unicron was said of the job that submits it: if it "
					"trains, submit it with --unicron, too");
	} else if (context == S_CTX_REMOTE && choice.enabled && is_regular_step(sp)) {
		/* Where the agent reports to, there the hints go. */
		if (spank_getenv(sp, "UNICRON_CONTROLLER", address, sizeof(address)) != ESPANK_SUCCESS)
			strcpy(address, config.controller);
		notify_set_controller(address);
		join_tasks(sp);
	}
	return (0);
}

/* srun knows its step by now, and its tasks get this process's environment. */
CALLBACK slurm_spank_local_user_init(spank_t sp, int ac, char **av)
{
	int argc = 0;
	char **argv = NULL;

	if (usable(ac, av) && choice.enabled && spank_get_item(sp, S_JOB_ARGV, &argc, &argv) == ESPANK_SUCCESS)
		submit_say_options(argc);
	return (0);
}

/*
 * The step that is about to start, with its whole environment. Its command's script is read for that, and nobody but the user knows how
 * large it is and where: each task does it in its own process, not slurmstepd. The first one's verdict is that of all on this node.
 */
static enum step_verdict judge_step(spank_t sp)
{
	struct step step;
	int verdict, before = STEP_UNJUDGED;

	step_read(sp, &step);
	verdict = step_judge(&step, choice.spoken, reason);
	if (verdict == STEP_PROTECTED && tasks_failed) {
		verdict = STEP_UNPROTECTED;
		strcpy(reason, "there aren't enough descriptors to join its tasks: raise the limit of slurmd");
	}
	if (__atomic_compare_exchange_n(agreed, &before, verdict, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
		return (verdict);
	if (before != verdict)
		strcpy(reason, "its script was changed while its tasks started: start it again");
	return (before);
}

static void set_variables(spank_t sp)
{
	hand_on(sp);
	if (!choice.spoken)
		inherit_set(sp, "UNICRON_BY_DEFAULT", "1");
	if (config.controller[0] != '\0')
		spank_setenv(sp, "UNICRON_CONTROLLER", config.controller, 0);
	if (config.file[0] != '\0')
		spank_setenv(sp, "UNICRON_CONFIG", config.file, 0);
}

/* The batch script gets what the user said, too: it may call the agent by hand. A step that is left alone by default gets nothing. */
CALLBACK slurm_spank_user_init(spank_t sp, int ac, char **av)
{
	if (!usable(ac, av))
		return (0);
	if (!choice.enabled) {
		if (choice.spoken)
			hand_on(sp);
		return (0);
	}
	if (choice.spoken && is_batch_step(sp))
		batch_set_variables(sp);
	if (choice.spoken)
		set_variables(sp);
	return (0);
}

CALLBACK slurm_spank_task_init(spank_t sp, int ac, char **av)
{
	uint32_t task = 0, local = 0;
	enum step_verdict verdict;

	if (!usable(ac, av) || !choice.enabled)
		return (0);
	if (choice.spoken && is_batch_step(sp))
		batch_prepare(sp, config.controller);
	if (!is_regular_step(sp))
		return (0);
	verdict = judge_step(sp);
	if (verdict != STEP_UNTOUCHED)
		batch_step_came(sp, config.controller);
	if (verdict == STEP_PROTECTED && !choice.spoken)
		set_variables(sp);
	if (verdict == STEP_PROTECTED && spank_get_item(sp, S_TASK_ID, &local) == ESPANK_SUCCESS)
		agent_wrap(sp, config.agent, local);
	else if (verdict == STEP_UNPROTECTED && (spank_get_item(sp, S_TASK_GLOBAL_ID, &task) != ESPANK_SUCCESS || task == 0))
		slurm_spank_log("unicron: this step runs unprotected: %s", reason);
	return (0);
}

CALLBACK slurm_spank_task_post_fork(spank_t sp, int ac, char **av)
{
	(void) sp;
	(void) ac;
	(void) av;

	tasks_forked();
	return (0);
}

/* The node's first task is the agent; what the others tell of their ranks, it has told. */
CALLBACK slurm_spank_task_exit(spank_t sp, int ac, char **av)
{
	struct notice notice = { .kind = "task_exit" };
	uint32_t local = 0;

	if (!usable(ac, av) || !choice.enabled)
		return (0);
	if (choice.spoken && is_batch_step(sp))
		batch_end(sp, config.controller);
	if (!is_regular_step(sp) || *agreed != STEP_PROTECTED)
		return (0);
	if (spank_get_item(sp, S_TASK_EXIT_STATUS, &notice.status) != ESPANK_SUCCESS)
		return (0);
	if (spank_get_item(sp, S_TASK_ID, &local) == ESPANK_SUCCESS && local > 0)
		return (0);
	notice_identify(sp, &notice);
	notify_send(&notice);
	return (0);
}
