/* SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "launch.h"
#include "tasks.h"

#define DIGITS 12    /* of a descriptor in the list, with its comma */

static int (*pairs)[2];       /* of the tasks 1, 2, ...: the agent's end, and the task's own */
static uint32_t number, forked;

static void close_all(void)
{
	for (uint32_t i = 0; i < number; ++i) {
		close(pairs[i][0]);
		close(pairs[i][1]);
	}
	free(pairs);
	pairs = NULL;
	number = 0;
}

int tasks_open(uint32_t count)
{
	pairs = calloc(count - 1, sizeof(*pairs));
	if (pairs == NULL)
		return (-1);
	for (number = 0; number < count - 1; ++number) {
		if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pairs[number]) < 0) {
			close_all();
			return (-1);
		}
	}
	return (0);
}

void tasks_forked(void)
{
	if (number > 0 && ++forked == number + 1)
		close_all();
}

static int keep(int fd)
{
	return (fcntl(fd, F_SETFD, 0));
}

int tasks_keep(spank_t sp, uint32_t local)
{
	char *list, own[DIGITS];
	size_t length = 0;
	int rv;

	if (number == 0)
		return (0);
	if (local > number)
		return (-1);
	if (local > 0) {
		snprintf(own, sizeof(own), "%d", pairs[local - 1][1]);
		return (keep(pairs[local - 1][1]) == 0 && spank_setenv(sp, UNICRON_TASK, own, 1) == ESPANK_SUCCESS ? 0 : -1);
	}
	list = calloc(number, DIGITS);
	if (list == NULL)
		return (-1);
	for (uint32_t i = 0; i < number; ++i) {
		if (keep(pairs[i][0]) < 0)
			break;
		length += (size_t) snprintf(list + length, DIGITS, "%s%d", i > 0 ? "," : "", pairs[i][0]);
	}
	rv = spank_setenv(sp, UNICRON_TASKS, list, 1) == ESPANK_SUCCESS ? 0 : -1;
	free(list);
	return (rv);
}
