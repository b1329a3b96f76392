/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the agent gets in front of the command.
 *
 * An execve() in task_init would do, but Slurm has work left after task_init: later SPANK plugins, TaskProlog and --task-prolog,
 * TMPDIR, and the user's resource limits (memlock among them, without which RDMA fails). All of that would be lost, silently.
 * So the command line is changed, and Slurm executes it when it is ready. What it then executes is unicron-launch, which lies
 * beside the plugin: it becomes the agent, or the user's command where the agent cannot be executed, be it for an interpreter that
 * is gone. Nobody can know that before: the file may be there and still be no program. The launcher itself is tried here, for the
 * task's root may be a container's by now, where there is none or it does not run; the agent's folder has one that runs anywhere.
 *   - from Slurm 23.11 on, spank_prepend_task_argv() puts "unicron-launch AGENT" in front of the command;
 *   - before, the command's first word is replaced by unicron-launch, which finds the agent and the word in two variables.
 *     Those releases will not change any more, and S_JOB_ARGV is in them the vector that the task executes. (With srun
 *     --multi-prog it is another one: such a step just runs unprotected.)
 */
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"
#include "launch.h"
#include "tasks.h"

#define MOUNT "ask the administrator to mount the agent's folder there (docs/containers.md)"

static const char *base_name(const char *path)
{
	const char *slash = strrchr(path, '/');

	return (slash ? slash + 1 : path);
}

static bool is_agent(const char *command, const char *agent)
{
	return (strcmp(command, agent) == 0 || strcmp(base_name(command), "unicron-agent") == 0);
}

static char launcher[PATH_MAX];

void agent_set_launcher(const char *path)
{
	snprintf(launcher, sizeof(launcher), "%s", path);
}

static struct stat root;    /* of slurmstepd; st_ino is 0 where it is not known */

void agent_note_root(void)
{
	if (stat("/", &root) < 0)
		root.st_ino = 0;
}

/* A container plugin has given this task another root than slurmstepd's. */
static bool in_container(void)
{
	struct stat here;

	return (root.st_ino != 0 && stat("/", &here) == 0 && (here.st_ino != root.st_ino || here.st_dev != root.st_dev));
}

/*
 * Whether the launcher runs in this task's root, which may be a container's by now: what is there need not be a program there.
 * Called without a command it says so at once. It is not the agent that is tried, for the launcher does that itself.
 */
static bool launcher_runs(void)
{
	char *const words[] = { launcher, (char *) UNICRON_LAUNCH_TRY, NULL };
	pid_t child = fork();
	int status = 0;

	if (child == 0) {
		execv(launcher, words);
		_exit(127);
	}
	if (child < 0)
		return (false);
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			return (false);
	return (WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* NAME in the folder of a file. */
static bool beside(const char *file, char path[PATH_MAX])
{
	return (snprintf(path, PATH_MAX, "%.*s" UNICRON_LAUNCHER, (int) (base_name(file) - file), file) < PATH_MAX);
}

enum found { MISSING, BROKEN, RUNS };

static enum found try_launcher(void)
{
	return (access(launcher, X_OK) != 0 ? MISSING : launcher_runs() ? RUNS : BROKEN);
}

/* The launcher beside the plugin, or, in a container, beside the agent. Returns why there is none, or NULL. */
static const char *find_launcher(const char *agent)
{
	enum found found = MISSING;
	Dl_info info;

	if (launcher[0] != '\0' || (dladdr((void *) (uintptr_t) agent_wrap, &info) != 0 && info.dli_fname != NULL &&
				    beside(info.dli_fname, launcher)))
		found = try_launcher();
	if (found != RUNS && in_container() && beside(agent, launcher))
		found = try_launcher();
	if (found == RUNS)
		return (NULL);
	if (in_container())
		return ("the agent there has no " UNICRON_LAUNCHER " beside it that runs in this container; " MOUNT);
	return (found == BROKEN ? UNICRON_LAUNCHER " cannot be executed here; install it again with make install"
				: UNICRON_LAUNCHER " isn't installed beside the plugin; install it with make install");
}

#if UNICRON_PREPENDS

static const char *prepend(spank_t sp, const char *agent, char **argv)
{
	const char *front[] = { launcher, agent };

	(void) argv;
	return (spank_prepend_task_argv(sp, 2, front) == ESPANK_SUCCESS ? NULL : "Slurm refused the longer command line");
}

#else

static const char *prepend(spank_t sp, const char *agent, char **argv)
{
	if (spank_setenv(sp, UNICRON_LAUNCH_AGENT, agent, 1) != ESPANK_SUCCESS ||
	    spank_setenv(sp, UNICRON_LAUNCH_COMMAND, argv[0], 1) != ESPANK_SUCCESS)
		return ("Slurm refused the longer environment");
	argv[0] = launcher;
	return (NULL);
}

#endif

void agent_wrap(spank_t sp, const char *agent, uint32_t local)
{
	int argc = 0;
	char **argv = NULL;
	const char *reason = NULL;

	if (spank_get_item(sp, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS || argc < 1 || argv == NULL || argv[0] == NULL)
		reason = "Slurm doesn't tell its command line";
	else if (agent[0] == '\0')
		reason = "plugstack.conf names no agent; ask the administrator to add agent=/path/to/unicron-agent";
	else if (is_agent(argv[0], agent))
		return;
	else if (argv[0][0] == '\0' || argv[0][strlen(argv[0]) - 1] == '/')
		reason = "the command is copied into a folder; name a file in --bcast";
	else if (access(agent, X_OK) != 0)
		reason = in_container() ? "the task's container has no such program; " MOUNT : strerror(errno);
	else if ((reason = find_launcher(agent)) != NULL)
		;
	else if (tasks_keep(sp, local) < 0)
		reason = "Slurm refused the longer environment";
	else
		reason = prepend(sp, agent, argv);

	if (reason != NULL && local == 0)
		slurm_spank_log("unicron: couldn't protect this task with %s: %s; it runs unprotected",
				agent[0] != '\0' ? agent : "the agent", reason);
}
