/* SPDX-License-Identifier: Apache-2.0 */
/*
 * unicron-launch AGENT COMMAND ARGUMENT...: executes "AGENT run -- COMMAND ARGUMENT...". When the agent cannot be executed, the
 * command is. Before Slurm 23.11 the plugin puts it in the place of a task's first word (agent.c says why): AGENT and COMMAND are
 * then in the environment, and all arguments are the command's. "unicron-launch --try" does nothing: it shows that it runs.
 * Where the tasks of a node have one agent, the first becomes it and the others wait for their rank (tasks.h, wait.h).
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "launch.h"
#include "set_aside.h"
#include "wait.h"

/* Returns where the agent cannot be executed. */
static void become_agent(char *agent, char *command, int argc, char **argv)
{
	const char *tasks = getenv(UNICRON_TASKS);
	char **line = calloc((size_t) argc + 4, sizeof(*line)), who[32];

	snprintf(who, sizeof(who), "%c%ld", TELL_AGENT, (long) getpid());
	tell_tasks(tasks, who);
	if (line == NULL) {
		fprintf(stderr, "unicron: couldn't start the agent: %s; the command runs unprotected\n", strerror(errno));
	} else {
		line[0] = agent;
		line[1] = (char *) "run";
		line[2] = (char *) "--";
		line[3] = command;
		memcpy(line + 4, argv + 1, (size_t) (argc - 1) * sizeof(*line));
		rename_variables("PYTHON", UNICRON_USERS "PYTHON");
		setenv(UNICRON_LAUNCH_FORMAT, UNICRON_LAUNCH_NUMBER, 1);
		execv(agent, line);
		unsetenv(UNICRON_LAUNCH_FORMAT);
		rename_variables(UNICRON_USERS "PYTHON", "PYTHON");
		fprintf(stderr, "unicron: couldn't start %s: %s; the command runs unprotected\n", agent, strerror(errno));
	}
	who[0] = TELL_RUN;
	tell_tasks(tasks, who);
	unsetenv(UNICRON_TASKS);
}

/* Returns where the agent says that the command is to run. */
static void wait_for_its_rank(void)
{
	int channel = atoi(getenv(UNICRON_TASK));

	unsetenv(UNICRON_TASK);
	wait_for_rank(channel);
}

int main(int argc, char **argv)
{
	char *agent = getenv(UNICRON_LAUNCH_AGENT);
	char *command = getenv(UNICRON_LAUNCH_COMMAND);

	if (agent == NULL && command == NULL && argc == 2 && strcmp(argv[1], UNICRON_LAUNCH_TRY) == 0)
		return (0);
	if (agent != NULL && command != NULL) {
		/* The pointers outlive unsetenv: it takes an entry off the list and leaves its text alone. */
		unsetenv(UNICRON_LAUNCH_AGENT);
		unsetenv(UNICRON_LAUNCH_COMMAND);
	} else if (argc > 2) {
		agent = argv[1];
		command = argv[2];
		argc -= 2;
		argv += 2;
	} else {
		fprintf(stderr, "unicron-launch: couldn't find a command: only unicron.so calls this program\n");
		return (2);
	}

	if (getenv(UNICRON_TASK) != NULL)
		wait_for_its_rank();
	else
		become_agent(agent, command, argc, argv);

	argv[0] = command;
	execvp(command, argv);
	fprintf(stderr, "unicron: couldn't start %s: %s\n", command, strerror(errno));
	return (errno == ENOENT ? 127 : 126);
}
