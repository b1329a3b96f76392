/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands in for a container plugin such as pyxis: from task_init on the task's root is the folder in the plugin's first argument. The
 * folders in the further ones are mounted there, each at its own path.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mount.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

SPANK_PLUGIN(container, 1)

int slurm_spank_task_init_privileged(spank_t sp, int ac, char **av)
{
	char target[PATH_MAX];

	(void) sp;
	if (ac < 1 || (ac > 1 && (unshare(CLONE_NEWNS) < 0 || mount("", "/", "", MS_REC | MS_PRIVATE, NULL) < 0)))
		return (-1);
	for (int i = 1; i < ac; ++i) {
		snprintf(target, sizeof(target), "%s%s", av[0], av[i]);
		if (mount(av[i], target, "", MS_BIND | MS_REC, NULL) < 0) {
			slurm_spank_log("container: couldn't mount %s: %m", av[i]);
			return (-1);
		}
	}
	return (chroot(av[0]) == 0 && chdir("/") == 0 ? 0 : -1);
}
