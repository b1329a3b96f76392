/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <glob.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "wait.h"

#define MOST_CPUS 8192
#define MESSAGE_BYTES 65536
#define START_MS (10 * 60 * 1000)    /* for the node's first task to start its agent: TaskProlog comes before */

extern char **environ;

void tell_tasks(const char *list, const char *message)
{
	while (list != NULL && *list != '\0') {
		char *rest;
		long fd = strtol(list, &rest, 10);

		if (rest == list)
			return;
		send((int) fd, message, strlen(message), MSG_NOSIGNAL | MSG_DONTWAIT);
		if (message[0] == TELL_RUN)
			close((int) fd);
		list = *rest == ',' ? rest + 1 : rest;
	}
}

static void give_up(const char *why)
{
	fprintf(stderr, "unicron: this task couldn't wait for its rank: %s\n", why);
	_exit(1);
}

static size_t add(char *text, size_t length, const char *word, bool first)
{
	int more = snprintf(text + length, MESSAGE_BYTES - length, "%s%s", first ? "" : ",", word);

	return (more < 0 || length + (size_t) more >= MESSAGE_BYTES ? length : length + (size_t) more);
}

static size_t add_cpus(char *text, size_t length)
{
	cpu_set_t *set = CPU_ALLOC(MOST_CPUS);
	size_t size = CPU_ALLOC_SIZE(MOST_CPUS);
	bool first = true;

	if (set == NULL || sched_getaffinity(0, size, set) < 0)
		return (length);
	for (int cpu = 0; cpu < MOST_CPUS; ++cpu) {
		char word[16];

		if (!CPU_ISSET_S(cpu, size, set))
			continue;
		snprintf(word, sizeof(word), "%d", cpu);
		length = add(text, length, word, first);
		first = false;
	}
	CPU_FREE(set);
	return (length);
}

/* The cards that this task may open. access() asks its cgroup, too, and wakes none of them up. */
static size_t add_devices(char *text, size_t length)
{
	static const char *const patterns[] = { "/dev/nvidia[0-9]*", "/dev/dri/renderD*" };
	bool first = true;

	for (size_t i = 0; i < sizeof(patterns) / sizeof(*patterns); ++i) {
		glob_t found;

		if (glob(patterns[i], 0, NULL, &found) != 0)
			continue;
		for (size_t j = 0; j < found.gl_pathc; ++j) {
			if (access(found.gl_pathv[j], R_OK | W_OK) != 0)
				continue;
			length = add(text, length, found.gl_pathv[j], first);
			first = false;
		}
		globfree(&found);
	}
	return (length);
}

/* A file with this process's environment, each variable ended by a zero byte; -1 when it can't be made. */
static int environment_file(void)
{
	int fd = memfd_create("unicron-environment", MFD_CLOEXEC);
	FILE *file = fd < 0 ? NULL : fdopen(dup(fd), "w");
	bool good = file != NULL;

	for (char **entry = environ; good && *entry != NULL; ++entry)
		good = fwrite(*entry, strlen(*entry) + 1, 1, file) == 1;
	if (file != NULL && fclose(file) != 0)
		good = false;
	if (fd >= 0 && !good) {
		close(fd);
		fd = -1;
	}
	return (fd);
}

/* What this task is, to the agent. */
static void hand_over(int channel)
{
	static char text[MESSAGE_BYTES];
	int fds[3] = { STDOUT_FILENO, STDERR_FILENO, environment_file() };
	union {
		char space[CMSG_SPACE(sizeof(fds))];
		struct cmsghdr align;
	} control = { .space = { 0 } };
	struct iovec data = { .iov_base = text };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = control.space,
				  .msg_controllen = sizeof(control.space) };
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);

	if (fds[2] < 0)
		give_up(strerror(errno));
	data.iov_len = add_cpus(text, 0);
	text[data.iov_len++] = '\n';
	data.iov_len = add_devices(text, data.iov_len);
	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN(sizeof(fds));
	memcpy(CMSG_DATA(head), fds, sizeof(fds));
	sendmsg(channel, &message, MSG_NOSIGNAL);    /* when nobody is there any more, the channel says so */
	close(fds[2]);
}

/* The environment becomes what is in the file. */
static void set_environment(int fd)
{
	struct stat about;
	char *text, **entries;
	size_t count = 0;

	if (fstat(fd, &about) < 0 || about.st_size == 0)
		return;
	text = mmap(NULL, (size_t) about.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	if (text == MAP_FAILED || text[about.st_size - 1] != '\0')
		give_up("its environment can't be read");
	for (off_t i = 0; i < about.st_size; ++i)
		count += text[i] == '\0';
	entries = calloc(count + 1, sizeof(*entries));
	if (entries == NULL)
		give_up(strerror(errno));
	for (size_t i = 0; i < count; ++i) {
		entries[i] = text;
		text += strlen(text) + 1;
	}
	environ = entries;
}

/* The next message in `text`, as a string, and the descriptor that came with it, or -1. False at the channel's end. */
static bool receive(int channel, char text[64], int *fd)
{
	union {
		char space[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec data = { .iov_base = text, .iov_len = 63 };
	struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = control.space,
				  .msg_controllen = sizeof(control.space) };
	ssize_t got = recvmsg(channel, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	struct cmsghdr *head;

	*fd = -1;
	if (got <= 0) {
		text[0] = '\0';
		/* ECONNRESET comes once, before what was said last: the other side has ended, and not read everything. */
		return (got < 0 && (errno == EAGAIN || errno == EINTR || errno == ECONNRESET));
	}
	text[got] = '\0';
	head = CMSG_FIRSTHDR(&message);
	if (head != NULL && head->cmsg_type == SCM_RIGHTS && head->cmsg_len == CMSG_LEN(sizeof(int)))
		memcpy(fd, CMSG_DATA(head), sizeof(int));
	return (true);
}

static void end_as(int code)
{
	static const struct rlimit none;
	sigset_t one;

	if (code >= 0)
		_exit(code);
	setrlimit(RLIMIT_CORE, &none);    /* it is the rank's */
	signal(-code, SIG_DFL);
	sigemptyset(&one);
	sigaddset(&one, -code);
	sigprocmask(SIG_UNBLOCK, &one, NULL);
	raise(-code);
	_exit(128 - code);
}

/* The signals of this task are as they were, and what came of them meanwhile comes now. */
static void stop_waiting(int channel, const sigset_t *before)
{
	close(channel);
	sigprocmask(SIG_SETMASK, before, NULL);
}

void wait_for_rank(int channel)
{
	struct pollfd watched[2] = { { .fd = channel, .events = POLLIN }, { .fd = -1, .events = POLLIN } };
	bool begun = false, gone = false;
	sigset_t all, before;
	char text[64];
	int fd;

	/* Slurm signals all tasks of a step: the agent passes on to the ranks what is for them, and says when they have ended. */
	sigfillset(&all);
	sigprocmask(SIG_BLOCK, &all, &before);
	for (;;) {
		int ready = poll(watched, 2, begun ? -1 : START_MS);

		if (ready < 0 && errno != EINTR)
			give_up(strerror(errno));
		gone = gone || watched[1].revents != 0;    /* what it said last can be read by now */
		if (!receive(channel, text, &fd) || (text[0] == '\0' && gone) || ready == 0) {
			if (begun)
				end_as(-SIGKILL);    /* as the kernel ends the ranks of an agent that is gone */
			fprintf(stderr, "unicron: this task runs unprotected: the node's first task has no agent\n");
			stop_waiting(channel, &before);
			return;
		}
		switch (text[0]) {
		case TELL_AGENT:
			begun = true;
			watched[1].fd = (int) syscall(SYS_pidfd_open, (pid_t) atoi(text + 1), 0);
			gone = watched[1].fd < 0 && errno == ESRCH;
			break;
		case TELL_HAND:
			hand_over(channel);
			break;
		case TELL_RUN:
			if (fd >= 0)
				set_environment(fd);
			stop_waiting(channel, &before);
			return;
		case TELL_END:
			end_as(atoi(text + 1));
		}
	}
}
