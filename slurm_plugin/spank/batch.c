/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "batch.h"
#include "inherit.h"
#include "script.h"

#define STEPS 4                      /* restarts after which a step number comes again */
#define STEP_MS (30 * 1000)          /* for Slurm to run one that does nothing */
#define FIRST_STEP "UNICRON_FIRST_STEP"    /* agent/connections/job_environment.py takes it off the step's number */
#define SWEEP "UNICRON_SWEEP"               /* agent/start/untouched.py */

extern char **environ;

static long read_count(spank_t sp, const char *name)
{
	char text[32];

	return (spank_getenv(sp, name, text, sizeof(text)) == ESPANK_SUCCESS ? strtol(text, NULL, 10) : 0);
}

/* Slurm leaves a job the variables of the array's element that has submitted it: it would be taken for that element. */
static void forget_other_array(spank_t sp)
{
	static const char *const names[] = {
		"SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_MIN",
		"SLURM_ARRAY_TASK_STEP",
	};
	uint32_t array = 0;

	if (spank_get_item(sp, S_JOB_ARRAY_ID, &array) != ESPANK_SUCCESS || (array != 0 && array != NO_VAL))
		return;
	for (size_t i = 0; i < sizeof(names) / sizeof(*names); ++i)
		spank_unsetenv(sp, names[i]);
}

/*
 * sbatch --no-kill is for the allocation alone. Without it srun ends its step when one of the nodes is lost, and the rest could not
 * go on. An array's element is requeued as a whole.
 */
void batch_set_variables(spank_t sp)
{
	char text[16];

	forget_other_array(sp);
	if (read_count(sp, "SLURM_JOB_NUM_NODES") > 1 &&
	    spank_getenv(sp, "SLURM_ARRAY_TASK_ID", text, sizeof(text)) != ESPANK_SUCCESS &&
	    spank_getenv(sp, "SLURM_NO_KILL", text, sizeof(text)) == ESPANK_ENV_NOEXIST)
		inherit_set(sp, "SLURM_NO_KILL", "set");
}

/* Whether `srun true` ran in this job, within its time. */
static bool use_up_step(char **env)
{
	static const char *const words[] = { "srun", "--ntasks=1", "--nodes=1", "--quiet", "true", NULL };
	int status = 0, left = STEP_MS;
	pid_t child = fork();

	if (child == 0) {
		int null = open("/dev/null", O_RDWR);

		environ = env;
		setenv("UNICRON", "0", 1);
		unsetenv("SLURM_NTASKS_PER_NODE");
		for (int fd = 0; fd < 3; ++fd)
			dup2(null, fd);
		execvp(words[0], (char *const *) words);
		_exit(127);
	}
	if (child < 0)
		return (false);
	while (waitpid(child, &status, left > 0 ? WNOHANG : 0) != child) {
		nanosleep(&(struct timespec) { .tv_nsec = 10 * 1000 * 1000 }, NULL);
		if ((left -= 10) == 0)
			kill(child, SIGKILL);
	}
	return (WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/*
 * When a node that was cut off comes back, the srun on it ends and cancels its step by number. By then the job may have been requeued,
 * and run a step of that number on another node. So a restarted script's steps have other numbers than those before it.
 */
static void use_up_steps(spank_t sp)
{
	long count = read_count(sp, "SLURM_RESTART_COUNT") % STEPS, used = 0;
	char **env = NULL, text[16];

	if (count <= 0 || spank_get_item(sp, S_JOB_ENV, &env) != ESPANK_SUCCESS || env == NULL)
		return;
	while (used < count && use_up_step(env))
		++used;
	snprintf(text, sizeof(text), "%ld", used);
	inherit_set(sp, FIRST_STEP, text);
}

static bool read_script(spank_t sp, struct script *script)
{
	int argc = 0;
	char **argv = NULL;

	return (spank_get_item(sp, S_JOB_ARGV, &argc, &argv) == ESPANK_SUCCESS && argc > 0 && argv != NULL && script_read(argv[0], script));
}

/* The Epilog removes it, too, where the end of the script has not. */
static bool mark(spank_t sp, const char *controller, char path[64])
{
	const char *port = strrchr(controller, ':');
	uint32_t job = 0;

	if (spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS)
		return (false);
	snprintf(path, 64, "/dev/shm/unicron-%" PRIu32 "-no-step-%.5s", job, port != NULL ? port + 1 : "");
	return (true);
}

static void await_step(spank_t sp, const char *controller)
{
	char path[64];

	if (mark(sp, controller, path))
		close(open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
}

/* What to write in a script in which no srun starts a training. */
static void advise(const struct script *script)
{
	static const char nothing[] = "unicron: nothing protects this job, for";

	if (script->starter[0] != '\0')
		dprintf(STDERR_FILENO, "%s %s starts its ranks: unless they use MPI, let srun start them, without %s and its host file "
			"(`srun --ntasks-per-node=N python train.py`), or write `srun --ntasks-per-node=1 torchrun ...`\n",
			nothing, script->starter, script->starter);
	else if (script->server[0] != '\0' && script->word[0] != '\0')
		dprintf(STDERR_FILENO, "%s no srun in its script starts a training: if `%s ...` trains, and is no client of `%s`, write "
			"`srun %s ...`\n", nothing, script->word, script->server, script->word);
	else if (script->server[0] != '\0')
		dprintf(STDERR_FILENO, "unicron: `%s` is no training, and runs as it is\n", script->server);
	else
		dprintf(STDERR_FILENO, "%s no srun in its script starts a training: write `srun %s ...`\n",
			nothing, script->word[0] != '\0' ? script->word : "python train.py");
}

/*
 * Tells what is not protected: what the script doesn't start by srun, and the runs of a sweep, whose agents hear of it. A user chooses
 * what there is to read, and where: so the script's own process does it, in which it holds up nothing but this job.
 */
static void look_at_script(spank_t sp, const char *controller)
{
	char text[32];
	struct script script;

	if (!read_script(sp, &script))
		return;
	if (script.step && !script.agent && !script.cut)
		await_step(sp, controller);
	if (script.cut && !script.step)
		dprintf(STDERR_FILENO, "unicron: this job's script names more files than are read: make sure that it starts its training "
			"by srun, for nothing else is protected\n");
	else if (!script.step)
		advise(&script);
	if (script.sweep[0] != '\0' && spank_getenv(sp, "SLURM_ARRAY_TASK_ID", text, sizeof(text)) == ESPANK_SUCCESS &&
	    spank_getenv(sp, SWEEP, text, sizeof(text)) == ESPANK_ENV_NOEXIST)    /* 0 is the user's own word */
		inherit_set(sp, SWEEP, script.sweep);
}

void batch_prepare(spank_t sp, const char *controller)
{
	look_at_script(sp, controller);
	use_up_steps(sp);
}

void batch_step_came(spank_t sp, const char *controller)
{
	char path[64];

	if (mark(sp, controller, path))
		unlink(path);
}

void batch_end(spank_t sp, const char *controller)
{
	struct stat about;
	uid_t user = 0;
	char path[64];

	if (mark(sp, controller, path) && spank_get_item(sp, S_JOB_UID, &user) == ESPANK_SUCCESS && lstat(path, &about) == 0 &&
	    about.st_uid == user && unlink(path) == 0)
		slurm_spank_log("unicron: no step of this job was protected, for its script has run no srun that starts a training: if "
				"it trained, write `srun python train.py ...`");
}
