/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bin/unicron-agent and bin/python of the agent's folder (tools/agent_folder.py): starts the folder's own Python by the folder's own
 * loader, wherever the folder lies. It is linked statically, for the container around it may be of any system, or have no shell.
 *
 * By the name unicron-agent it runs the agent, by any other name it is the Python that the agent starts its helpers with.
 * The loader is told where the libraries are in its arguments, so the ranks inherit nothing of that. The user's LD_ variables are
 * for the container's own programs: they are set aside, and the agent gives them back to the ranks (agent/start/entry.py).
 */
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../spank/launch.h"
#include "../spank/set_aside.h"
#include "../spank/wait.h"

#define AGENT "unicron-agent"
#define OWN_WORDS 11    /* at most, before those of the caller */

static const char *base_name(const char *path)
{
	const char *slash = strrchr(path, '/');

	return (slash ? slash + 1 : path);
}

/* The folder of which this is bin/NAME: by the kernel's word, or, where there is no /proc, by the caller's. -1 where neither tells. */
static int find_folder(const char *called, char folder[PATH_MAX])
{
	ssize_t length = readlink("/proc/self/exe", folder, PATH_MAX - 1);

	if (length > 0)
		folder[length] = '\0';
	else if (called[0] != '/' || snprintf(folder, PATH_MAX, "%s", called) >= PATH_MAX)
		return (-1);
	for (int levels = 0; levels < 2; ++levels) {
		char *slash = strrchr(folder, '/');

		if (slash == NULL)
			return (-1);
		*slash = '\0';
	}
	return (0);
}

/* FOLDER/NAME, or NULL. */
static char *inside(const char *folder, const char *name)
{
	char *path;

	return (asprintf(&path, "%s/%s", folder, name) < 0 ? NULL : path);
}

/* The agent's Python cannot be started: the command of "run -- COMMAND ..." is, as unicron-launch would. */
static int run_without_agent(int argc, char **argv, const char *what, int error)
{
	bool has_command = argc > 3 && strcmp(argv[1], "run") == 0 && strcmp(argv[2], "--") == 0;

	fprintf(stderr, "unicron: couldn't start %s: %s%s\n", what, strerror(error), has_command ? "; the command runs unprotected" : "");
	if (!has_command)
		return (126);
	tell_tasks(getenv(UNICRON_TASKS), (const char[]) { TELL_RUN, '\0' });
	unsetenv(UNICRON_TASKS);
	rename_variables(UNICRON_USERS, "");
	execvp(argv[3], argv + 3);
	fprintf(stderr, "unicron: couldn't start %s: %s\n", argv[3], strerror(errno));
	return (errno == ENOENT ? 127 : 126);
}

int main(int argc, char **argv)
{
	char folder[PATH_MAX], **line = calloc((size_t) argc + OWN_WORDS + 1, sizeof(*line));
	bool is_agent = argc > 0 && strcmp(base_name(argv[0]), AGENT) == 0;
	int words = 0;

	if (argc < 1 || line == NULL || find_folder(argv[0], folder) < 0)
		return (run_without_agent(argc, argv, "the agent of a folder that is not found", ENOENT));
	line[words++] = inside(folder, "lib/loader");
	line[words++] = (char *) "--argv0";
	line[words++] = inside(folder, "bin/python");
	line[words++] = (char *) "--library-path";
	line[words++] = inside(folder, "lib");
	line[words++] = inside(folder, "lib/interpreter");
	if (is_agent) {
		line[words++] = (char *) "-I";
		line[words++] = (char *) "-m";
		line[words++] = (char *) "unicron_ctl.agent.start.entry";
	}
	for (int i = 0; i < words; ++i)
		if (line[i] == NULL || (line[i][0] == '/' && access(line[i], R_OK) < 0))
			return (run_without_agent(argc, argv, line[i] ? line[i] : "the agent", errno));
	memcpy(line + words, argv + 1, (size_t) (argc - 1) * sizeof(*line));
	rename_variables("LD_", UNICRON_USERS "LD_");
	execv(line[0], line);
	return (run_without_agent(argc, argv, line[0], errno));
}
