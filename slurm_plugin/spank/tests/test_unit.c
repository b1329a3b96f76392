/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs the plugin's own code without Slurm, under the address and undefined-behaviour sanitizers: this file plays Slurm's side
 * of the SPANK interface. The datagrams are printed in hexadecimal for the Python test, which decodes them with another
 * implementation of MessagePack.
 */
#undef NDEBUG
#include <arpa/inet.h>
#include <assert.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"
#include "args.h"
#include "config.h"
#include "inherit.h"
#include "msgpack.h"
#include "notify.h"
#include "script.h"
#include "shell_text.h"
#include "step.h"
#include "submit.h"

/* ---- Slurm's side ---- */
static spank_context_t context;
static struct { char name[64], value[256]; } job_env[48];
static int job_env_count;
static struct spank_option *registered[8];
static int registered_count, errors, messages;
static uint32_t step_id;
static char *job_argv[8];
static int task_status;
static uint32_t local_task;

spank_context_t spank_context(void) { return (context); }

spank_err_t spank_option_register(spank_t sp, struct spank_option *option)
{
	(void) sp;
	registered[registered_count++] = option;
	return (ESPANK_SUCCESS);
}

spank_err_t spank_getenv(spank_t sp, const char *name, char *buffer, int size)
{
	(void) sp;
	for (int i = 0; i < job_env_count; ++i)
		if (strcmp(job_env[i].name, name) == 0)
			return (snprintf(buffer, (size_t) size, "%s", job_env[i].value) >= size ? ESPANK_NOSPACE : ESPANK_SUCCESS);
	return (ESPANK_ENV_NOEXIST);
}

spank_err_t spank_setenv(spank_t sp, const char *name, const char *value, int overwrite)
{
	int i;

	(void) sp;
	for (i = 0; i < job_env_count && strcmp(job_env[i].name, name) != 0; ++i)
		;
	if (i < job_env_count && !overwrite)
		return (ESPANK_ENV_EXISTS);
	snprintf(job_env[i].name, sizeof(job_env[i].name), "%s", name);
	snprintf(job_env[i].value, sizeof(job_env[i].value), "%s", value);
	if (i == job_env_count)
		job_env_count++;
	return (ESPANK_SUCCESS);
}

spank_err_t spank_unsetenv(spank_t sp, const char *name)
{
	(void) sp;
	(void) name;
	return (ESPANK_SUCCESS);
}

spank_err_t spank_get_item(spank_t sp, spank_item_t item, ...)
{
	va_list list;

	(void) sp;
	va_start(list, item);
	switch (item) {
	case S_JOB_ID:
		*va_arg(list, uint32_t *) = 4711;
		break;
	case S_JOB_STEPID:
		*va_arg(list, uint32_t *) = step_id;
		break;
	case S_JOB_NODEID:
		*va_arg(list, uint32_t *) = 0;
		break;
	case S_JOB_ARGV:
		*va_arg(list, int *) = 2;
		*va_arg(list, char ***) = job_argv;
		break;
	case S_TASK_ID:
		*va_arg(list, uint32_t *) = local_task;
		break;
	case S_TASK_EXIT_STATUS:
		*va_arg(list, int *) = task_status;
		break;
	default:
		va_end(list);
		return (ESPANK_BAD_ARG);
	}
	va_end(list);
	return (ESPANK_SUCCESS);
}

#if UNICRON_PREPENDS
spank_err_t spank_prepend_task_argv(spank_t sp, int argc, const char *argv[])
{
	(void) sp;
	assert(argc == 2 && strcmp(argv[1], "/bin/true") == 0);
	job_argv[0] = (char *) argv[0];
	return (ESPANK_SUCCESS);
}
#endif

/* A node list without brackets is all that is asked for here. */
typedef __typeof__(slurm_hostlist_create(NULL)) hosts;
hosts slurm_hostlist_create(const char *names) { return ((hosts) strdup(names)); }
char *slurm_hostlist_shift(hosts list) { return (strdup((char *) list)); }
void slurm_hostlist_destroy(hosts list) { free(list); }

void slurm_error(const char *format, ...) { (void) format; errors++; }
void slurm_spank_log(const char *format, ...) { (void) format; messages++; }
void slurm_verbose(const char *format, ...) { (void) format; }

/* The plugin's own opens and reads, counted. */
static size_t opened, bytes_read;

int open(const char *path, int flags, ...)
{
	opened++;
	return ((int) syscall(SYS_openat, AT_FDCWD, path, flags, 0600));
}

ssize_t read(int fd, void *data, size_t size)
{
	ssize_t got = syscall(SYS_read, fd, data, size);

	bytes_read += got > 0 ? (size_t) got : 0;
	return (got);
}

/* ---- the tests ---- */
static void print_hex(const char *name, const unsigned char *data, size_t length)
{
	printf("%s ", name);
	for (size_t i = 0; i < length; ++i)
		printf("%02x", data[i]);
	printf("\n");
}

static void test_msgpack(void)
{
	static const int64_t numbers[] = { 0, 127, 128, 255, 256, 65535, 65536, 4294967295LL, 4294967296LL, INT64_MAX,
					   -1, -32, -33, -128, -129, -32768, -32769, -2147483648LL, -2147483649LL, INT64_MIN };
	static const size_t lengths[] = { 0, 1, 31, 32, 255, 256, 65535 };
	static unsigned char data[70000];
	static char text[65537];
	struct msgpack out;

	for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); ++i) {
		char name[40];

		msgpack_init(&out, data, sizeof(data));
		msgpack_int(&out, numbers[i]);
		assert(!out.overflow);
		snprintf(name, sizeof(name), "int %lld", (long long) numbers[i]);
		print_hex(name, data, out.used);
	}
	for (size_t i = 0; i < sizeof(lengths) / sizeof(*lengths); ++i) {
		char name[40];

		memset(text, 'x', lengths[i]);
		text[lengths[i]] = '\0';
		msgpack_init(&out, data, sizeof(data));
		msgpack_text(&out, text);
		assert(!out.overflow);
		snprintf(name, sizeof(name), "text %zu", lengths[i]);
		print_hex(name, data, out.used);
	}
	memset(text, 'x', 65536);
	text[65536] = '\0';
	msgpack_init(&out, data, sizeof(data));
	msgpack_text(&out, text);
	assert(out.overflow);

	/* What does not fit is refused as a whole, at every size. */
	for (size_t size = 0; size < 6; ++size) {
		unsigned char *small = malloc(size ? size : 1);

		msgpack_init(&out, small, size);
		msgpack_text(&out, "12345");
		assert(out.overflow == (size < 6) && out.used <= size);
		free(small);
	}
}

static void test_notice(void)
{
	struct notice notice = { .kind = "task_exit", .job = "4294967294", .element = 4000000, .slurm_id = 4294967294LL, .status = 9 };
	unsigned char data[512];
	size_t length;

	memset(notice.node, 'n', sizeof(notice.node) - 1);
	length = notice_encode(&notice, data, sizeof(data));
	assert(length > 0);
	print_hex("notice", data, length);
	assert(notice_encode(&notice, data, 16) == 0);
}

static void test_numbers(void)
{
	static const char *good[] = { "1", "0.5", "2.5e3", "1e-3", ".5", "+1" };
	static const char *bad[] = { "", "0", "-1", "nan", "inf", "1e999", "1e-999", "0x10", " 1", "1 ", "1,5", "a", "1.2.3", "--1",
				     "1111111111111111111111111111111111111111111" };
	static const char *bad_nodes[] = { "", "0", "-1", "1.5", "+1", " 1", "99999999999", "x", "1e2" };

	for (size_t i = 0; i < sizeof(good) / sizeof(*good); ++i)
		assert(args_check(ARGS_WEIGHT, good[i]));
	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); ++i)
		assert(!args_check(ARGS_WEIGHT, bad[i]));
	assert(args_check(ARGS_MIN_NODES, "1") && args_check(ARGS_MIN_NODES, "2147483647"));
	for (size_t i = 0; i < sizeof(bad_nodes) / sizeof(*bad_nodes); ++i)
		assert(!args_check(ARGS_MIN_NODES, bad_nodes[i]));
	assert(args_check(ARGS_SPARES, "0") && args_check(ARGS_SPARES, "2147483647"));
	for (size_t i = 0; i < sizeof(bad_nodes) / sizeof(*bad_nodes); ++i)
		assert(!args_check(ARGS_SPARES, bad_nodes[i]) || strcmp(bad_nodes[i], "0") == 0);
}

static void test_addresses(void)
{
	static const char *bad[] = { "", "tcp://", "tcp://:1", "tcp://host", "tcp://host:", "tcp://host:0", "tcp://host:65536",
				     "tcp://host:1x", "udp://host:1", "tcp://[::1:1", "tcp://::1:1", "tcp://[]:1", "tcp://[:1" };
	char host[UNICRON_HOST_MAX];
	char address[UNICRON_HOST_MAX + 32];
	unsigned port;

	assert(config_split_address("tcp://head-1.example:7700", host, &port) == 0 && strcmp(host, "head-1.example") == 0 && port == 7700);
	assert(config_split_address("tcp://[::1]:65535", host, &port) == 0 && strcmp(host, "::1") == 0 && port == 65535);
	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); ++i)
		assert(config_split_address(bad[i], host, &port) < 0);
	memset(address, 'h', sizeof(address));
	memcpy(address, "tcp://", 6);
	strcpy(address + sizeof(address) - 3, ":1");
	assert(config_split_address(address, host, &port) < 0);

	const char *list = "tcp://a:1,tcp://b:2";
	assert(config_next_address(&list, address) == 0 && strcmp(address, "tcp://a:1") == 0);
	assert(config_next_address(&list, address) == 0 && strcmp(address, "tcp://b:2") == 0 && list == NULL);
	list = "";
	assert(config_next_address(&list, address) == 0 && *address == '\0' && list == NULL);
}

static void test_config(void)
{
	char *good[] = { (char *) "agent=/a", (char *) "controller=tcp://h:1", (char *) "config=/c", (char *) "default=on" };
	char *bad[] = { (char *) "agnet=/a", (char *) "agent=a", (char *) "controller=h:1", (char *) "default=yes", (char *) "default",
			(char *) "", (char *) "controller=tcp://h:1,", (char *) "controller=tcp://h:1,h:2",
			(char *) "controller=tcp://a:1,tcp://b:1,tcp://c:1,tcp://d:1,tcp://e:1" };
	char *several[] = { (char *) "controller=tcp://a:1,tcp://b:2" };
	struct plugin_config config;

	assert(config_parse(&config, 1, several) == 0 && strcmp(config.controller, several[0] + 11) == 0);
	assert(config_parse(&config, 4, good) == 0);
	assert(strcmp(config.agent, "/a") == 0 && strcmp(config.controller, "tcp://h:1") == 0 && config.by_default);
	assert(config_parse(&config, 0, NULL) == 0 && !config.by_default && config.agent[0] == '\0');
	for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); ++i) {
		errors = 0;
		assert(config_parse(&config, 1, bad + i) < 0 && errors == 1);
	}
}

static int option(const char *name, const char *value, int remote)
{
	for (int i = 0; i < registered_count; ++i)
		if (strcmp(registered[i]->name, name) == 0)
			return (registered[i]->cb(registered[i]->val, value, remote));
	abort();
}

/* One line per case: where, options in their order, environment, the default; and what is to come of it. */
static void test_choice(void)
{
	static const struct {
		spank_context_t where;
		const char *options;     /* y: --unicron, n: --no-unicron, w: --unicron-weight, m: --unicron-mode */
		const char *environment;
		bool by_default, enabled, spoken;
		int rc;
	} cases[] = {
		{ S_CTX_LOCAL, "", NULL, false, false, false, 0 },
		{ S_CTX_LOCAL, "", NULL, true, true, false, 0 },
		{ S_CTX_LOCAL, "y", NULL, false, true, true, 0 },
		{ S_CTX_LOCAL, "n", NULL, true, false, true, 0 },
		{ S_CTX_LOCAL, "w", NULL, false, true, true, 0 },
		{ S_CTX_LOCAL, "nw", NULL, true, false, true, 0 },
		{ S_CTX_LOCAL, "wn", NULL, false, false, true, 0 },
		{ S_CTX_LOCAL, "w", "0", false, false, true, 0 },
		{ S_CTX_LOCAL, "m", NULL, false, true, true, 0 },
		{ S_CTX_LOCAL, "nm", NULL, true, false, true, 0 },
		{ S_CTX_LOCAL, "y", "0", false, true, true, 0 },
		{ S_CTX_LOCAL, "n", "1", true, false, true, 0 },
		{ S_CTX_LOCAL, "", "1", false, true, true, 0 },
		{ S_CTX_LOCAL, "", "0", true, false, true, 0 },
		{ S_CTX_LOCAL, "", "maybe", false, false, false, -1 },
		{ S_CTX_LOCAL, "ny", NULL, false, true, true, 0 },
		{ S_CTX_LOCAL, "yn", NULL, true, false, true, 0 },
		{ S_CTX_REMOTE, "ny", "1", false, true, true, 0 },
		{ S_CTX_REMOTE, "yn", "1", false, true, true, 0 },
		{ S_CTX_REMOTE, "yn", "0", false, false, true, 0 },
		{ S_CTX_REMOTE, "yn", NULL, true, false, true, 0 },
		{ S_CTX_REMOTE, "n", "1", true, false, true, 0 },
	};
	struct plugin_choice choice;

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); ++i) {
		int rc;

		args_reset();
		context = cases[i].where;
		job_env_count = 0;
		unsetenv("UNICRON");
		if (cases[i].environment != NULL && context == S_CTX_REMOTE)
			spank_setenv(NULL, "UNICRON", cases[i].environment, 1);
		else if (cases[i].environment != NULL)
			setenv("UNICRON", cases[i].environment, 1);
		for (const char *c = cases[i].options; *c; ++c)
			option(*c == 'y' ? "unicron" : *c == 'n' ? "no-unicron" : *c == 'm' ? "unicron-mode" : "unicron-weight",
			       *c == 'w' ? "2" : *c == 'm' ? "restart" : NULL, context == S_CTX_REMOTE);
		rc = args_choose(NULL, cases[i].by_default, &choice);
		if (rc != cases[i].rc || choice.enabled != cases[i].enabled || choice.spoken != cases[i].spoken) {
			fprintf(stderr, "case %zu: rc %d enabled %d spoken %d\n", i, rc, choice.enabled, choice.spoken);
			abort();
		}
	}

	args_reset();
	unsetenv("UNICRON");
	context = S_CTX_LOCAL;
	setenv("UNICRON_WEIGHT", "3", 1);
	setenv("UNICRON_MIN_NODES", "4", 1);
	assert(args_choose(NULL, false, &choice) == 0 && !choice.enabled);
	assert(strcmp(choice.values[ARGS_WEIGHT], "3") == 0 && strcmp(choice.values[ARGS_MIN_NODES], "4") == 0);
	assert(option("unicron-weight", "5", 0) == 0 && args_choose(NULL, false, &choice) == 0);
	assert(choice.enabled && strcmp(choice.values[ARGS_WEIGHT], "5") == 0);
	assert(option("unicron-weight", "bad", 0) == -1 && option("unicron-min-nodes", "0", 0) == -1);
	assert(option("unicron-weight", "bad", 1) == 0 && option("unicron-min-nodes", NULL, 1) == 0);
	setenv("UNICRON_MIN_NODES", "x", 1);
	assert(args_choose(NULL, false, &choice) == -1 && choice.values[ARGS_MIN_NODES][0] == '\0');
	unsetenv("UNICRON_WEIGHT");
	unsetenv("UNICRON_MIN_NODES");
	args_reset();
	assert(args_choose(NULL, false, &choice) == 0 && strcmp(choice.values[ARGS_MODE], "auto") == 0 && choice.values[ARGS_MIN_NODES][0] == '\0');
	setenv("UNICRON_MODE", "session", 1);
	assert(args_choose(NULL, false, &choice) == 0 && !choice.enabled && strcmp(choice.values[ARGS_MODE], "session") == 0);
	assert(option("unicron-mode", "restart", 0) == 0 && args_choose(NULL, false, &choice) == 0);
	assert(choice.enabled && strcmp(choice.values[ARGS_MODE], "restart") == 0);
	assert(option("unicron-mode", "Restart", 0) == -1 && option("unicron-mode", NULL, 0) == -1);
	assert(option("unicron-mode", "fast", 1) == 0);
	args_reset();
	setenv("UNICRON_MODE", "fast", 1);
	assert(args_choose(NULL, false, &choice) == -1 && strcmp(choice.values[ARGS_MODE], "auto") == 0);
	unsetenv("UNICRON_MODE");
	args_reset();

	assert(args_choose(NULL, false, &choice) == 0 && !choice.enabled && choice.values[ARGS_SPARES][0] == '\0');
	setenv("UNICRON_SPARES", "2", 1);
	assert(args_choose(NULL, false, &choice) == 0 && !choice.enabled && strcmp(choice.values[ARGS_SPARES], "2") == 0);
	assert(option("unicron-spares", "1", 0) == 0 && args_choose(NULL, false, &choice) == 0);
	assert(choice.enabled && strcmp(choice.values[ARGS_SPARES], "1") == 0);
	assert(option("unicron-spares", "-1", 0) == -1 && option("unicron-spares", "one", 1) == 0);
	args_reset();
	setenv("UNICRON_SPARES", "one", 1);
	assert(args_choose(NULL, false, &choice) == -1 && choice.values[ARGS_SPARES][0] == '\0');
	unsetenv("UNICRON_SPARES");
	args_reset();

	assert(option("unicron-preload", "torch,megatron.core", 0) == 0 && args_choose(NULL, false, &choice) == 0);
	assert(choice.enabled && strcmp(choice.values[ARGS_PRELOAD], "torch,megatron.core") == 0);
	assert(option("unicron-preload", "torch; rm", 0) == -1 && option("unicron-preload", "", 0) == -1);
	assert(option("unicron-preload", NULL, 1) == 0);
	args_reset();
}

/* What a command line is, its words separated by spaces; FILE stands for a script with the given text, @ for a space in a word. */
static void test_commands(void)
{
	static const struct { const char *line, *script; enum command_kind kind; } cases[] = {
		{ "hostname", NULL, COMMAND_UTILITY },
		{ "/usr/bin/mkdir -p python", NULL, COMMAND_UTILITY },
		{ "nvidia-smi -l 5", NULL, COMMAND_UTILITY },
		{ "env", NULL, COMMAND_UTILITY },
		{ "env A=1 timeout 10 hostname", NULL, COMMAND_UTILITY },
		{ "./test", NULL, COMMAND_MAY_TRAIN },
		{ "./a.out hostname", NULL, COMMAND_MAY_TRAIN },
		{ "env -u cat ./a.out", NULL, COMMAND_MAY_TRAIN },
		{ "numactl --cpunodebind=0 ./lammps", NULL, COMMAND_MAY_TRAIN },
		{ "sh -c hostname", NULL, COMMAND_UTILITY },
		{ "bash -c while@:;@do@nvidia-smi@>>log@2>&1;@sleep@10;@done", NULL, COMMAND_UTILITY },
		{ "sh -c for@x@in@a@b;@do@cp@\"${HOME}/$x\"@/tmp@&@done;@wait", NULL, COMMAND_UTILITY },
		{ "bash -c nvidia-smi;@./train", NULL, COMMAND_SHELL },
		{ "bash -c $CMD", NULL, COMMAND_SHELL },
		{ "FILE python train.py", "#!/bin/sh\nexport A=1\nexec \"$@\"\n", COMMAND_TRAINS },
		{ "bash FILE torchrun train.py", "export A=1\nexec \"$@\"\n", COMMAND_TRAINS },
		{ "sh -c exec@\"$@\" sh python train.py", NULL, COMMAND_TRAINS },
		{ "./solver model.py", NULL, COMMAND_MAY_TRAIN },
		{ "pythonic", NULL, COMMAND_MAY_TRAIN },
		{ "python train.py", NULL, COMMAND_TRAINS },
		{ "/opt/env/bin/python3.11 -u train.py", NULL, COMMAND_TRAINS },
		{ "./train.py", NULL, COMMAND_TRAINS },
		{ "nice -n 10 python3 train.py", NULL, COMMAND_TRAINS },
		{ "timeout -s KILL 3600 python train.py", NULL, COMMAND_TRAINS },
		{ "nsys profile -o out python train.py", NULL, COMMAND_TRAINS },
		{ "uv run train.py", NULL, COMMAND_TRAINS },
		{ "apptainer exec --nv image.sif python train.py", NULL, COMMAND_TRAINS },
		{ "singularity exec image.sif ./solver", NULL, COMMAND_MAY_TRAIN },
		{ "torchrun --nproc-per-node=8 train.py", NULL, COMMAND_TRAINS },
		{ "accelerate launch train.py", NULL, COMMAND_TRAINS },
		{ "python -m torch.distributed.run train.py", NULL, COMMAND_TRAINS },
		{ "env A=1 mpirun ./solver", NULL, COMMAND_TRAINS },
		{ "bash FILE", "#!/bin/bash\nset -e\nexec python train.py\n", COMMAND_TRAINS },
		{ "bash -e FILE", "cd work\nsource env.sh && torchrun train.py\n", COMMAND_TRAINS },
		{ "FILE", "#!/bin/sh\nexec ./a.out\n", COMMAND_SHELL },
		{ "FILE", "#!/bin/sh\nset -e\nmkdir -p x # make it\ncp a x && exit 0\n", COMMAND_UTILITY },
		{ "FILE", "#!/usr/bin/env python3\nimport torchrun\nmpirun = 1\n", COMMAND_TRAINS },
		{ "sh FILE", "# python train.py was here\nhostname\n", COMMAND_UTILITY },
		{ "bash -lc python$IFS", NULL, COMMAND_TRAINS },
		{ "bash /nonexistent/file", NULL, COMMAND_MAY_TRAIN },
		{ "bash", NULL, COMMAND_MAY_TRAIN },
		{ "bash /dev/zero", NULL, COMMAND_MAY_TRAIN },
		{ "bash -euo pipefail FILE", "python train.py\n", COMMAND_TRAINS },
		{ "bash -o pipefail FILE", "python train.py\n", COMMAND_TRAINS },
		{ "bash +O extglob -- FILE", "python train.py\n", COMMAND_TRAINS },
		{ "bash -oO pipefail extglob FILE", "python train.py\n", COMMAND_TRAINS },
		{ "bash --rcfile f FILE", "python train.py\n", COMMAND_TRAINS },
		{ "bash --init-file f --norc FILE", "python train.py\n", COMMAND_TRAINS },
		{ "bash -euxo pipefail -c python@train.py@--x=1", NULL, COMMAND_TRAINS },
		{ "bash -euxoc pipefail python@-u@train", NULL, COMMAND_TRAINS },
		{ "bash -c -e python@-u@train", NULL, COMMAND_TRAINS },
		{ "bash -magic python@-u@train", NULL, COMMAND_MAY_TRAIN },
		{ "bash -euo", NULL, COMMAND_MAY_TRAIN },
		{ "bash -c FILE", "#!/bin/sh\npython train.py\n", COMMAND_TRAINS },
		{ "bash -c FILE", "#!/bin/sh\nexec ./a.out\n", COMMAND_SHELL },
		{ "bash -c cd@/tmp&&A=1@nice@bash@-eu@FILE", "torchrun train.py\n", COMMAND_TRAINS },
		{ "sh -c if@true;then@.@FILE;fi", "python train.py\n", COMMAND_TRAINS },
		{ "bash -c cat@FILE", "python train.py\n", COMMAND_UTILITY },
		{ "sudo -u me FILE", "#!/bin/sh\n./a.out\n", COMMAND_MAY_TRAIN },
		{ "sudo -u me bash FILE", "python train.py\n", COMMAND_TRAINS },
		{ "doas -u me python train.py", NULL, COMMAND_TRAINS },
		{ "xargs -a list -n 1 python train.py", NULL, COMMAND_TRAINS },
		{ "xargs -n 1 bash -euo pipefail FILE", "python train.py\n", COMMAND_TRAINS },
		{ "gdb -ex run --args python train.py", NULL, COMMAND_TRAINS },
		{ "cuda-gdb --args python3 train.py", NULL, COMMAND_TRAINS },
		{ "valgrind --tool=memcheck python train.py", NULL, COMMAND_TRAINS },
		{ "compute-sanitizer --tool memcheck python train.py", NULL, COMMAND_TRAINS },
		{ "script -qec python@-u@train log", NULL, COMMAND_TRAINS },
		{ "script -c A=1@python@-u@train", NULL, COMMAND_TRAINS },
		{ "script -qc FILE log", "#!/bin/sh\npython train.py\n", COMMAND_TRAINS },
		{ "script -qc hostname log", NULL, COMMAND_UTILITY },
		{ "xargs -n 1 grep . FILE", "python train.py\n", COMMAND_MAY_TRAIN },
		{ "python3.11-dbg train.py", NULL, COMMAND_TRAINS },
		{ "python3-config --libs", NULL, COMMAND_MAY_TRAIN },
		{ "awk {print@$1} python.txt", NULL, COMMAND_UTILITY },
		{ "awk BEGIN{system(\"python@-u@train\")}", NULL, COMMAND_TRAINS },
		{ "awk BEGIN{system@(\"./x\")}", NULL, COMMAND_MAY_TRAIN },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); ++i) {
		char line[256], path[] = "/tmp/unicron-test-XXXXXX", *words[16], *rest;
		const char *file = strstr(cases[i].line, "FILE");
		int count = 0, fd = mkstemp(path);
		struct command found;

		assert(fd >= 0);
		if (cases[i].script != NULL)
			assert(write(fd, cases[i].script, strlen(cases[i].script)) == (ssize_t) strlen(cases[i].script));
		close(fd);
		if (file != NULL)
			snprintf(line, sizeof(line), "%.*s%s%s", (int) (file - cases[i].line), cases[i].line, path, file + 4);
		else
			snprintf(line, sizeof(line), "%s", cases[i].line);
		for (char *word = strtok_r(line, " ", &rest); word != NULL; word = strtok_r(NULL, " ", &rest)) {
			for (char *at = word; *at != '\0'; ++at)
				*at = *at == '@' ? ' ' : *at;
			words[count++] = word;
		}
		words[count] = NULL;
		reading_begin();
		found = command_of(words, true);
		if (found.kind != cases[i].kind) {
			fprintf(stderr, "%s: kind %d\n", cases[i].line, found.kind);
			abort();
		}
		unlink(path);
	}
}

/* Servers train nothing: not advised, and not adopted. An argument or an environment of that name is none. */
static void test_servers(void)
{
	static const struct { const char *line, *server; enum command_kind kind; } cases[] = {
		{ "python -m vllm.entrypoints.openai.api_server --model m", "vllm.entrypoints.openai.api_server", COMMAND_SERVES },
		{ "/opt/env/bin/python3.11 -u -X dev -m sglang.launch_server", "sglang.launch_server", COMMAND_SERVES },
		{ "env A=1 timeout 60 python3 -m http.server 8000", "http.server", COMMAND_SERVES },
		{ "/opt/env/bin/vllm serve m", "vllm serve", COMMAND_SERVES },
		{ "python /opt/env/bin/vllm serve m", "vllm serve", COMMAND_SERVES },
		{ "singularity exec --nv -B /x img.sif python -m vllm.entrypoints.openai.api_server", "vllm.entrypoints.openai.api_server", COMMAND_SERVES },
		{ "apptainer exec --nv img.sif tritonserver --model-repository=/m", "tritonserver", COMMAND_SERVES },
		{ "conda run -n vllm vllm serve m", "vllm serve", COMMAND_SERVES },
		{ "mpirun -n 2 python -m vllm.entrypoints.openai.api_server", "vllm.entrypoints.openai.api_server", COMMAND_SERVES },
		{ "ray start --head --block", "ray start", COMMAND_SERVES },
		{ "bash -c source@env/bin/activate;@exec@vllm@serve@m", "vllm serve", COMMAND_SERVES },
		{ "bash -c python@-m@http.server", "http.server", COMMAND_SERVES },
		{ "bash -c vllm@serve@m@&@python@train.py", NULL, COMMAND_TRAINS },
		{ "bash -c vllm@serve@m@&@./train", NULL, COMMAND_SHELL },
		{ "vllm bench", NULL, COMMAND_MAY_TRAIN },
		{ "ray symmetric-run -- python train.py", NULL, COMMAND_MAY_TRAIN },
		{ "jupyter nbconvert --execute train.ipynb", NULL, COMMAND_MAY_TRAIN },
		{ "python -m http.servers", NULL, COMMAND_TRAINS },
		{ "python train.py vllm serve", NULL, COMMAND_TRAINS },
		{ "python train.py -m http.server", NULL, COMMAND_TRAINS },
		{ "./train.py tensorboard", NULL, COMMAND_TRAINS },
		{ "python -c tensorboard", NULL, COMMAND_TRAINS },
		{ "conda run -n tensorboard python train.py", NULL, COMMAND_TRAINS },
		{ "env -u tritonserver python train.py", NULL, COMMAND_TRAINS },
		{ "accelerate launch --log_with wandb tensorboard train.py", NULL, COMMAND_TRAINS },
		{ "mpirun -n 2 python train.py tensorboard", NULL, COMMAND_TRAINS },
		{ "nice ./train tensorboard", NULL, COMMAND_MAY_TRAIN },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); ++i) {
		char line[256], *words[16], *rest;
		int count = 0;
		struct command found;

		snprintf(line, sizeof(line), "%s", cases[i].line);
		for (char *word = strtok_r(line, " ", &rest); word != NULL; word = strtok_r(NULL, " ", &rest)) {
			for (char *at = word; *at != '\0'; ++at)
				*at = *at == '@' ? ' ' : *at;
			words[count++] = word;
		}
		words[count] = NULL;
		reading_begin();
		found = command_of(words, true);
		if (found.kind != cases[i].kind || (found.server == NULL) != (cases[i].server == NULL) ||
		    (found.server != NULL && strcmp(found.server, cases[i].server) != 0)) {
			fprintf(stderr, "%s: kind %d, %s\n", cases[i].line, found.kind, found.server != NULL ? found.server : "no server");
			abort();
		}
	}
}

/* What a batch script says of launchers that must not stand behind srun, and of servers. */
static void test_starters(void)
{
	static const struct { const char *text, *starter, *server; bool step; } cases[] = {
		{ "mpirun -np 32 --hostfile h singularity exec img.sif python train.py\n", "mpirun", "", false },
		{ "python -c 'import torch'\ntime mpiexec.hydra -n 8 python train.py\n", "mpiexec.hydra", "", false },
		{ "srun hostname > h\n/opt/ompi/bin/mpirun.openmpi --hostfile h ./solver\n", "mpirun.openmpi", "", false },
		{ "bash inner\n", "horovodrun", "", false },
		{ ". ./inner\n", "horovodrun", "", false },
		{ "torchrun train.py\n", "", "", false },
		{ "python train.py --launcher mpirun\n", "", "", false },
		{ "srun python train.py; mpirun x\n", "", "", true },
		{ "srun mpirun -np 8 python train.py\n", "", "", true },
		{ "conda activate env\nvllm serve m --port 1\n", "", "vllm serve", false },
		{ "srun --gres=gpu:1 python -u -m vllm.entrypoints.openai.api_server\n", "", "vllm.entrypoints.openai.api_server", false },
		{ "srun -u apptainer exec --nv img.sif vllm serve m &\nwait\n", "", "vllm serve", false },
		{ "srun singularity exec img.sif tritonserver\n", "", "tritonserver", false },
		{ "srun -w n1 ray start --head --block &\npython driver.py\n", "", "ray start", false },
		{ "vllm serve m &\nsrun python train.py\n", "", "vllm serve", true },
		{ "srun -J tensorboard ./train\n", "", "", true },
	};
	char folder[] = "/tmp/unicron-test-XXXXXX";
	struct script found;

	assert(mkdtemp(folder) != NULL && chdir(folder) == 0);
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); ++i) {
		FILE *file = fopen("inner", "w");

		assert(file != NULL && fputs("cd /tmp\nhorovodrun -np 8 python train.py\n", file) >= 0 && fclose(file) == 0);
		file = fopen("script", "w");
		assert(file != NULL && fputs("#!/bin/bash\n", file) >= 0 && fputs(cases[i].text, file) >= 0 && fclose(file) == 0);
		assert(script_read("script", &found));
		if (found.step != cases[i].step || strcmp(found.starter, cases[i].starter) != 0 || strcmp(found.server, cases[i].server) != 0) {
			fprintf(stderr, "%s: step %d, '%s', '%s'\n", cases[i].text, found.step, found.starter, found.server);
			abort();
		}
	}
	assert(unlink("script") == 0 && unlink("inner") == 0 && chdir("/") == 0 && rmdir(folder) == 0);
}

/* What a shell runs is found by PATH, as without the shell: a front end of Python's, or a script that trains. */
static void test_front_ends(void)
{
	static const struct { const char *text; enum command_kind kind; } cases[] = {
		{ "NODE_RANK=$SLURM_NODEID tunecli train config.yaml", COMMAND_MAY_TRAIN },
		{ "cd work && exec wrapped train", COMMAND_MAY_TRAIN },
		{ "hostname; timeout 5 tunecli train", COMMAND_MAY_TRAIN },
		{ "copies a b", COMMAND_SHELL },
		{ "plain", COMMAND_SHELL },
		{ "nowhere train", COMMAND_SHELL },
		{ "hostname; sleep 5", COMMAND_UTILITY },
		{ "tunecli train; python x.py", COMMAND_TRAINS },
	};
	static const struct { const char *name, *text; mode_t mode; } files[] = {
		{ "tunecli", "#!/opt/env/bin/python3\nimport sys\n", 0700 }, { "wrapped", "#!/bin/sh\nexec python train.py\n", 0700 },
		{ "copies", "#!/bin/sh\ncp $1 $2\n", 0700 }, { "plain", "#!/usr/bin/python3\n", 0600 },
	};
	char folder[] = "/tmp/unicron-test-XXXXXX", path[128];

	assert(mkdtemp(folder) != NULL);
	for (size_t i = 0; i < sizeof(files) / sizeof(*files); ++i) {
		FILE *file;

		snprintf(path, sizeof(path), "%s/%s", folder, files[i].name);
		file = fopen(path, "w");
		assert(file != NULL && fputs(files[i].text, file) >= 0 && fclose(file) == 0 && chmod(path, files[i].mode) == 0);
	}
	snprintf(path, sizeof(path), "/nonexistent:%s:/usr/bin", folder);
	command_set_path(path);
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); ++i) {
		char *words[] = { (char *) "bash", (char *) "-c", (char *) cases[i].text, NULL };
		enum command_kind kind = command_of(words, true).kind;

		if (kind != cases[i].kind) {
			fprintf(stderr, "%s: kind %d\n", cases[i].text, kind);
			abort();
		}
	}
	command_set_path(NULL);
	for (size_t i = 0; i < sizeof(files) / sizeof(*files); ++i) {
		snprintf(path, sizeof(path), "%s/%s", folder, files[i].name);
		assert(unlink(path) == 0);
	}
	assert(rmdir(folder) == 0);
}

/* However many wrappers a user writes, they are judged in a moment and within the stack. */
static void test_many_wrappers(void)
{
	static const struct { size_t count; const char *command; enum command_kind kind; } cases[] = {
		{ 16, "hostname", COMMAND_UTILITY }, { 17, "hostname", COMMAND_MAY_TRAIN }, { 200000, "./x", COMMAND_MAY_TRAIN },
		{ 200000, "python", COMMAND_TRAINS }, { 200000, NULL, COMMAND_MAY_TRAIN },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); ++i) {
		char **words = calloc(cases[i].count + 2, sizeof(*words));

		assert(words != NULL);
		for (size_t k = 0; k < cases[i].count; ++k)
			words[k] = (char *) "nice";
		words[cases[i].count] = (char *) cases[i].command;
		alarm(60);
		assert(command_of(words, true).kind == cases[i].kind);
		alarm(0);
		free(words);
	}
}

/* Batch scripts: whether srun starts a training, what else does, and what shows that the job is a sweep. */
static void test_batch_scripts(void)
{
	static const struct { const char *text, *word; bool step; const char *sweep; } cases[] = {
		{ "#!/bin/bash\ntorchrun --nproc-per-node 8 train.py\n", "torchrun", false, "" },
		{ "#!/bin/sh\nexport A=1\nexec python train.py\n", "python", false, "" },
		{ "#!/bin/sh\nip=$(srun -N1 -n1 hostname)\nMASTER=$ip OMP_NUM_THREADS=4 accelerate launch train.py\n", "accelerate", false, "" },
		{ "#!/bin/sh\n# srun would do\nif true; then numactl -N 0 python3 train.py; fi\n", "numactl", false, "" },
		{ "#!/bin/sh\nmpirun -n 8 \\\n  python train.py\n", "mpirun", false, "" },
		{ "#!/bin/sh\nsrun mkdir -p out; srun -w n1 date\npython train.py\n", "python", false, "" },
		{ "#!/bin/sh\npython prepare.py\nsrun --mpi=pmix -c 4 python train.py\n", "", true, "" },
		{ "#!/bin/sh\nsrun \\\n --ntasks=4 \\\n torchrun train.py\n", "", true, "" },
		{ "#!/bin/sh\npip install x && python -c 1\nsrun bash -c \"$CMD\"\n", "", true, "" },
		{ "#!/bin/sh\npython prepare.py\nsrun $CMD\n", "", true, "" },
		{ "#!/bin/sh\npython prepare.py; /usr/bin/time srun ./train\n", "", true, "" },
		{ "#!/bin/sh\nunicron-agent run -- python train.py\n", "", true, "" },
		{ "#!/bin/sh\nhostname; sleep 5; cd /tmp; export A=1\n", "", false, "" },
		{ "#!/bin/sh\nhostname; sleep 5; ./train\n", "", true, "" },
		{ "#!/bin/sh\nmake train\n", "", true, "" },
		{ "#!/bin/bash\nPATH=$PWD:$PATH\nlaunch --config ds.json\n", "", true, "" },
		{ "#!/bin/sh\npython hides.py\n", "", true, "" },
		{ "#!/bin/sh\n./prepare data; python train.py\n", "python", false, "" },
		{ "#!/usr/bin/env python3\nimport os, subprocess\nsubprocess.run([os.environ['RUN'], 'x'])\n", "", true, "" },
		{ "#!/bin/sh\nsrun -N 1 -w n1 --mpi=pmix ./train -c echo\n", "", true, "" },
		{ "#!/bin/sh\nsrun env A=1 python train.py\n", "", true, "" },
		{ "#!/bin/sh\n./x.py\n", "./x.py", false, "" },
		{ "#!/usr/bin/env python3\nimport torch\n", "python", false, "" },
		{ "#!/usr/bin/python\nimport os; os.system('srun ./train')\n", "", true, "" },
		{ "#!/bin/sh\npython launch.py\n. ./names_srun\n", "", true, "names_srun" },
		{ "#!/bin/sh\n#SBATCH --output=%A_%a # SLURM_ARRAY_TASK_ID\nsrun python train.py $SLURM_ARRAY_JOB_ID\n", "", true, "" },
		{ "#!/bin/sh\nsrun python train.py --lr ${LRS[$SLURM_ARRAY_TASK_ID]}\n", "", true, "its batch script" },
		{ "#!/bin/sh\nsrun python names_srun\n", "", true, "names_srun" },
		{ "#!/bin/sh\n./speaks_of_it\n", "./speaks_of_it", false, "" },
		{ "#!/bin/sh\nbash speaks_of_it\necho write srun python x\n", "bash", false, "" },
		{ "#!/bin/bash\nsource speaks_of_it\n", "bash speaks_of_it", false, "" },
		{ "#!/bin/sh\npython says.py\n", "python", false, "" },
		{ "#!/bin/sh\nSRUN=srun\n$SRUN python light.py\n", "", true, "" },
		{ "#!/bin/sh\n${SRUN:-srun} python light.py\n", "", true, "" },
		{ "#!/bin/sh\nLAUNCH=\"/usr/bin/srun -n 2\"\n$LAUNCH python light.py\n", "", true, "" },
		{ "#!/bin/sh\nHOST=$(srun -n1 hostname)\n$PYTHON light.py; python a.py\n", "python", false, "" },
		{ "", "", false, "" },
	};
	char folder[] = "/tmp/unicron-test-XXXXXX", path[64];
	struct script found;
	FILE *file;

	assert(mkdtemp(folder) != NULL && chdir(folder) == 0);
	file = fopen("names_srun", "w");
	assert(file != NULL && fputs("srun python train.py $SLURM_ARRAY_TASK_ID\n", file) >= 0 && fclose(file) == 0);
	file = fopen("speaks_of_it", "w");
	assert(file != NULL && fputs("# no srun\nsrun hostname\necho 'no srun here'\ntorchrun x.py\n", file) >= 0 && fclose(file) == 0);
	file = fopen("says.py", "w");
	assert(file != NULL && fputs("\"\"\"srun python says.py\"\"\"\nimport torch  # by srun\n", file) >= 0 && fclose(file) == 0);
	file = fopen("hides.py", "w");
	assert(file != NULL && fputs("import subprocess\nsubprocess.run(['s' + 'run', 'x'])\n", file) >= 0 && fclose(file) == 0);
	snprintf(path, sizeof(path), "%s/script", folder);
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); ++i) {
		file = fopen(path, "w");
		assert(file != NULL && fputs(cases[i].text, file) >= 0 && fclose(file) == 0);
		assert(script_read(path, &found));
		assert(found.agent == (strstr(cases[i].text, "unicron-agent") != NULL));
		if (found.step != cases[i].step || (!found.step && strcmp(found.word, cases[i].word) != 0) ||
		    strcmp(found.sweep, cases[i].sweep) != 0) {
			fprintf(stderr, "script %zu: %d %s %s\n", i, found.step, found.word, found.sweep);
			abort();
		}
	}
	assert(!script_read("/nonexistent", &found));
	assert(unlink(path) == 0 && unlink("names_srun") == 0 && unlink("speaks_of_it") == 0 && unlink("says.py") == 0 && unlink("hides.py") == 0 && chdir("/") == 0 && rmdir(folder) == 0);
}

static void write_file(const char *path, const char *beginning, const char *line, size_t times, size_t names)
{
	FILE *file = fopen(path, "w");

	assert(file != NULL && fputs(beginning, file) >= 0);
	for (size_t i = 0; i < times; ++i)
		assert(fprintf(file, line, (int) (i % names)) > 0);
	assert(fclose(file) == 0);
}

/* Whatever a script names, and however often: so many files and bytes are read of it. What was not read is not judged. */
static void test_reading_is_bounded(void)
{
	static const struct { const char *line; size_t times, names; bool cut; } cases[] = {
		{ ": large large large large large large large\n", 1500, 1, false },    /* one name, again and again */
		{ "./large\n", 8000, 1, true },
		{ "source large;", 5000, 1, true },
		{ "bash large\n", 5000, 1, true },
		{ "nice bash large\n", 4000, 1, true },
		{ ": none%d\n", 6000, 6000, true },
		{ ": f%d\n", 6000, 64, true },
		{ "./f%d\n", 6000, 64, true },
	};
	char folder[] = "/tmp/unicron-test-XXXXXX", name[16], *words[] = { (char *) "bash", (char *) "script", NULL };
	struct script found;

	assert(mkdtemp(folder) != NULL && chdir(folder) == 0);
	write_file("large", "", "a b c d e f\n", 6000, 1);
	for (int i = 0; i < 64; ++i) {
		snprintf(name, sizeof(name), "f%d", i);
		write_file(name, "", "a b c d e f\n", 6000, 1);
	}
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); ++i) {
		write_file("script", "#!/bin/sh\n", cases[i].line, cases[i].times, cases[i].names);
		opened = bytes_read = 0;
		assert(script_read("script", &found) && !found.step);
		if (found.cut != cases[i].cut || opened > 2050 || bytes_read > 256 * 1024) {
			fprintf(stderr, "%s: cut %d, %zu files, %zu bytes\n", cases[i].line, found.cut, opened, bytes_read);
			abort();
		}
		reading_begin();
		opened = bytes_read = 0;
		command_of(words, true);
		assert(opened <= 66 && bytes_read <= 256 * 1024);
	}
	write_file("script", "#!/bin/sh\n", "./f%d\n", 50, 64);
	write_file("train.sh", "#!/bin/sh\n", "srun python train.py # %d\n", 100, 100);
	assert(script_read("script", &found) && found.cut);
	write_file("script", "#!/bin/sh\n", "./train.sh # %d\n", 500, 500);    /* usual files are read again as often as need be */
	assert(script_read("script", &found) && !found.cut && found.step);
	for (int i = 0; i < 64; ++i) {
		snprintf(name, sizeof(name), "f%d", i);
		assert(unlink(name) == 0);
	}
	assert(unlink("large") == 0 && unlink("script") == 0 && unlink("train.sh") == 0 && chdir("/") == 0 && rmdir(folder) == 0);
}

/* A job that another one submits has what the user set, and nothing of what the plugin set for the other. */
static void test_nested_submission(void)
{
	char *av[] = { NULL }, text[64];
	spank_context_t contexts[] = { S_CTX_ALLOCATOR, S_CTX_LOCAL };

	setenv("UNICRON_SPARES", "1", 1);
	for (size_t i = 0; i < sizeof(contexts) / sizeof(*contexts); ++i) {
		setenv("_SLURM_SPANK_OPTION_unicron_unicron", "(null)", 1);
		inherit_set(NULL, "UNICRON", "1");
		inherit_set(NULL, "UNICRON_SPARES", "1");
		inherit_set(NULL, "UNICRON_MIN_NODES", "2");
		setenv("UNICRON_MIN_NODES", "3", 1);    /* the script's own */
		args_reset();
		registered_count = job_env_count = messages = 0;
		context = contexts[i];
		assert(slurm_spank_init(NULL, 0, av) == 0 && slurm_spank_init_post_opt(NULL, 0, av) == 0);
		/* srun's step is of this job. */
		assert((getenv("UNICRON") == NULL) == (context == S_CTX_ALLOCATOR) && messages == (context == S_CTX_ALLOCATOR));
		assert((getenv(UNICRON_MARK "UNICRON") == NULL) == (context == S_CTX_ALLOCATOR));
		assert((getenv("_SLURM_SPANK_OPTION_unicron_unicron") == NULL) == (context == S_CTX_ALLOCATOR));
		assert(strcmp(getenv("UNICRON_SPARES"), "1") == 0 && strcmp(getenv("UNICRON_MIN_NODES"), "3") == 0);
	}
	inherit_forget();
	registered_count = 0;
	assert(slurm_spank_init(NULL, 0, av) == 0 && option("unicron-spares", "2", 0) == 0);
	context = S_CTX_ALLOCATOR;
	assert(slurm_spank_init_post_opt(NULL, 0, av) == 0 && strcmp(getenv("UNICRON_SPARES"), "2") == 0);
	assert(inherit_forget() && getenv("UNICRON") == NULL && getenv("UNICRON_SPARES") == NULL);
	unsetenv("UNICRON_MIN_NODES");
	args_reset();

	registered_count = job_env_count = messages = 0;
	inherit_set((spank_t) text, "UNICRON", "0");
	assert(spank_getenv(NULL, UNICRON_MARK "UNICRON", text, sizeof(text)) == ESPANK_SUCCESS && strcmp(text, "0") == 0);
	job_env_count = 0;
}

/* Which submissions ask for Unicron, as far as that can be seen before Slurm reads their options. */
static void test_submissions(void)
{
	static const struct { const char *words[5]; const char *script; bool before, asks, array; } cases[] = {
		{ { "sbatch", "--unicron", "job.sh" }, NULL, false, true, false },
		{ { "sbatch", "--unicron-min-nodes=2", "job.sh" }, NULL, false, true, false },
		{ { "sbatch", "job.sh" }, "#!/bin/sh\n#SBATCH -N 4 --unicron\n", false, true, false },
		{ { "sbatch", "job.sh" }, "#!/bin/sh\n\n# one\n#SBATCH --unicron-spares 1 # two\nsrun a\n", false, true, false },
		{ { "sbatch", "job.sh" }, "#!/bin/sh\nsrun a\n#SBATCH --unicron\n", false, false, false },
		{ { "sbatch", "job.sh" }, "#!/bin/sh\n##SBATCH --unicron\n#SBATCH -N1 # --unicron\n", false, false, false },
		{ { "sbatch", "--no-unicron", "job.sh" }, "#!/bin/sh\n#SBATCH --unicron\n", false, false, false },
		{ { "sbatch", "job.sh" }, "#!/bin/sh\n", true, true, false },
		{ { "sbatch", "--no-unicron", "job.sh" }, "#!/bin/sh\n", true, false, false },
		{ { "srun", "--unicronx", "a" }, NULL, false, false, false },
		{ { "srun", "--", "--unicron" }, NULL, false, false, false },
		{ { "sbatch", "--unicron", "-a0-3", "job.sh" }, NULL, false, true, true },
		{ { "sbatch", "job.sh" }, "#!/bin/sh\n#SBATCH --array=0-3 -N 4 --unicron\n", false, true, true },
		{ { NULL }, NULL, false, false, false },
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); ++i) {
		struct submission job = submit_read((char *const *) cases[i].words, cases[i].script, cases[i].before);

		if (job.asks != cases[i].asks || job.array != cases[i].array) {
			fprintf(stderr, "submission %zu\n", i);
			abort();
		}
	}
}

/* Which of the defaults a user says, in the script or on the command line: R(equeue), O(pen mode), K(ill). */
static void test_what_is_said(void)
{
	static const struct { const char *word, *script, *says; } cases[] = {
		{ "-N2", "#!/bin/sh\n", "" },
		{ "--no-requeue", NULL, "R" },
		{ "-Hk", "#SBATCH --requeue --open-mode truncate\n", "ROK" },
		{ "-N2", "#SBATCH --no-req\n#SBATCH -koff --op=t\ntrue\n", "ROK" },
		{ "-N2", "#SBATCH--requeue=expedite", "R" },
		{ "-N2", "#SBATCH\f-OHkoff\v'--open-mode' \"truncate\"", "OK" },
		{ "-N2", "#SBATCH -J a#b --no-requeue\n", "" },
		{ "-N2", "#SBATCH -J 'a #b' --no-\\requeue\n", "R" },
		{ "-N2", "#SBATCH --comment='--no-requeue --open-mode=append'\n", "" },
		{ "-N2", "#SBATCH --comment=\"not -k\" -J 'open\n#SBATCH --no-kill \\\n", "K" },
		{ "-N2", "true\n#SBATCH --no-requeue\n", "" },
		{ "-N2", " #SBATCH -k\n##SBATCH -k\n#sbatch -k\n#SBATCH\n#SBATC", "" },
		{ "-N2", "#SBATCH --re -Jk -ok -- -\n", "R" },    /* sbatch refuses --re */
	};
	char text[4096] = "#SBATCH --comment=", *words[] = { "sbatch", NULL, "job.sh", NULL };
	struct submission job;

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); ++i) {
		words[1] = (char *) cases[i].word;
		job = submit_read(words, cases[i].script, true);
		if (job.says[SUBMIT_REQUEUE] != (strchr(cases[i].says, 'R') != NULL) ||
		    job.says[SUBMIT_OPEN_MODE] != (strchr(cases[i].says, 'O') != NULL) ||
		    job.says[SUBMIT_NO_KILL] != (strchr(cases[i].says, 'K') != NULL)) {
			fprintf(stderr, "said %zu\n", i);
			abort();
		}
	}
	words[1] = "--no-unicr";
	job = submit_read(words, "#SBATCH --unicron -Ha0-3\n", true);
	assert(!job.asks && job.array);
	memset(text + strlen(text), 'x', 3000);
	strcpy(text + 3000, " --no-requeue --arr=0-3");
	job = submit_read(words, text, true);    /* a long line */
	assert(job.says[SUBMIT_REQUEUE] && job.array);
}

/* Which steps get an agent, by default and when the user asked for it. */
static void test_judge(void)
{
	static const struct command trains = { .kind = COMMAND_TRAINS }, shell = { .kind = COMMAND_SHELL }, may = { .kind = COMMAND_MAY_TRAIN };
	static const struct command utility = { .kind = COMMAND_UTILITY }, server = { .kind = COMMAND_SERVES };
	static const struct { struct step step; enum step_verdict by_default, asked; } cases[] = {
		{ { trains, 1, 1, 1, 1, 0, false, false, false }, STEP_PROTECTED, STEP_PROTECTED },
		{ { trains, 1, 1, 4, 4, 0, false, false, false }, STEP_PROTECTED, STEP_PROTECTED },
		{ { trains, 1, 1, 1, 1, 8, false, false, false }, STEP_PROTECTED, STEP_PROTECTED },
		{ { may, 1, 1, 1, 1, 0, false, false, false }, STEP_UNTOUCHED, STEP_PROTECTED },
		{ { utility, 1, 1, 1, 1, 0, false, false, false }, STEP_UNTOUCHED, STEP_UNTOUCHED },
		{ { utility, 8, 8, 4, 4, 0, false, false, false }, STEP_UNTOUCHED, STEP_UNTOUCHED },
		{ { server, 1, 1, 1, 1, 0, false, false, false }, STEP_UNTOUCHED, STEP_UNTOUCHED },
		/* several tasks on a node: its ranks, where they are as many on each and no other number was said */
		{ { trains, 8, 8, 4, 4, 0, false, false, false }, STEP_UNTOUCHED, STEP_PROTECTED },
		{ { trains, 4, 4, 1, 1, 4, false, false, false }, STEP_UNTOUCHED, STEP_PROTECTED },
		{ { trains, 8, 7, 4, 4, 0, false, false, false }, STEP_UNTOUCHED, STEP_UNPROTECTED },
		{ { trains, 4, 4, 4, 4, 8, false, false, false }, STEP_UNTOUCHED, STEP_UNPROTECTED },
		{ { may, 2, 2, 1, 1, 0, false, false, false }, STEP_UNTOUCHED, STEP_UNPROTECTED },
		{ { trains, 1, 1, 1, 4, 0, false, false, false }, STEP_UNTOUCHED, STEP_UNPROTECTED },
		{ { trains, 1, 1, 3, 4, 0, false, false, false }, STEP_UNTOUCHED, STEP_UNPROTECTED },
		{ { trains, 1, 1, 1, 1, 0, true, false, false }, STEP_UNTOUCHED, STEP_UNPROTECTED },
		{ { trains, 1, 1, 1, 1, 0, false, true, false }, STEP_UNTOUCHED, STEP_UNPROTECTED },
		{ { trains, 2, 2, 1, 1, 0, false, false, true }, STEP_UNTOUCHED, STEP_UNPROTECTED },
		{ { shell, 1, 1, 1, 1, 0, false, false, false }, STEP_UNTOUCHED, STEP_UNPROTECTED },
	};
	char said[UNICRON_REASON_MAX];

	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); ++i)
		if (step_judge(&cases[i].step, false, said) != cases[i].by_default ||
		    step_judge(&cases[i].step, true, said) != cases[i].asked ||
		    (said[0] != '\0') != (cases[i].asked == STEP_UNPROTECTED)) {
			fprintf(stderr, "case %zu: %s\n", i, said);
			abort();
		}
}

/* A helper of a job that asked for Unicron runs as it is and tells the controller nothing; one of several tasks says so. */
static void test_left_alone(int fd, int ac, char **av)
{
	unsigned char data[512];

	for (int many = 0; many < 2; ++many) {
		job_argv[0] = (char *) (many ? "python" : "hostname");
		if (many)
			spank_setenv(NULL, "SLURM_STEP_TASKS_PER_NODE", "1,8(x3)", 1);
		messages = 0;
		assert(slurm_spank_init_post_opt(NULL, ac, av) == 0);
		assert(slurm_spank_user_init(NULL, ac, av) == 0 && slurm_spank_task_init(NULL, ac, av) == 0);
		assert(strcmp(job_argv[0], many ? "python" : "hostname") == 0 && messages == many);
		assert(slurm_spank_task_exit(NULL, ac, av) == 0 && recv(fd, data, sizeof(data), MSG_DONTWAIT) < 0);
	}
	spank_setenv(NULL, "SLURM_STEP_TASKS_PER_NODE", "1", 1);
	messages = 0;
}

/* A script may be large, and lie where an open() never returns: only a task's own process reads it, never slurmstepd. */
static void test_only_tasks_read_scripts(int ac, char **av)
{
	char path[] = "/tmp/unicron-test-XXXXXX";
	int fd = mkstemp(path);

	assert(fd >= 0 && close(fd) == 0);
	write_file(path, "#!/bin/sh\n", "srun python train.py # %d\n", 1, 1);
	for (int batch = 0; batch < 2; ++batch) {
		step_id = batch ? SLURM_BATCH_SCRIPT : 0;
		job_argv[0] = path;
		job_argv[1] = NULL;
		opened = 0;
		assert(slurm_spank_init_post_opt(NULL, ac, av) == 0 && slurm_spank_user_init(NULL, ac, av) == 0 && opened == 0);
		assert(slurm_spank_task_post_fork(NULL, ac, av) == 0 && opened == 0);
		assert(slurm_spank_task_init(NULL, ac, av) == 0 && opened > 0);
		opened = 0;
		assert(slurm_spank_task_exit(NULL, ac, av) == 0 && opened == 0);
	}
	step_id = 0;
	job_argv[1] = (char *) "train.py";
	assert(unlink(path) == 0);
}

/* The life of a step, callback by callback, with the datagram received on a real socket. */
static void test_step(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t length = sizeof(address);
	char agent[] = "agent=/bin/true", controller[64], *av[] = { agent, controller };
	unsigned char data[512];
	char text[256];
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	ssize_t got;

	assert(fd >= 0 && bind(fd, (struct sockaddr *) &address, length) == 0);
	assert(getsockname(fd, (struct sockaddr *) &address, &length) == 0);
	snprintf(controller, sizeof(controller), "controller=tcp://127.0.0.1:%d", ntohs(address.sin_port));

	context = S_CTX_REMOTE;
	registered_count = job_env_count = 0;
	step_id = 0;
	job_argv[0] = (char *) "python";
	job_argv[1] = (char *) "train.py";
	spank_setenv(NULL, "SLURM_ARRAY_JOB_ID", "42", 1);
	spank_setenv(NULL, "SLURM_ARRAY_TASK_ID", "7", 1);
	spank_setenv(NULL, "SLURM_STEP_NODELIST", "node7", 1);
	agent_set_launcher("/bin/true");

	assert(slurm_spank_init(NULL, 2, av) == 0);
	assert(option("unicron", NULL, 1) == 0);
	assert(slurm_spank_init_post_opt(NULL, 2, av) == 0);
	assert(slurm_spank_user_init(NULL, 2, av) == 0);
	assert(spank_getenv(NULL, "UNICRON_CONTROLLER", text, sizeof(text)) == ESPANK_SUCCESS && strcmp(text, controller + 11) == 0);
	/* A minimum that nobody has stated is not exported: the launcher in the command may have one. */
	assert(spank_getenv(NULL, "UNICRON_MIN_NODES", text, sizeof(text)) != ESPANK_SUCCESS);
	messages = 0;
	assert(slurm_spank_task_init(NULL, 2, av) == 0);
	assert(strcmp(job_argv[0], "/bin/true") == 0 && messages == 0);

	task_status = 9;
	assert(slurm_spank_task_exit(NULL, 2, av) == 0);
	got = recv(fd, data, sizeof(data), 0);
	assert(got > 0);
	print_hex("step", data, (size_t) got);

	test_left_alone(fd, 2, av);
	test_only_tasks_read_scripts(2, av);
	while (recv(fd, data, sizeof(data), MSG_DONTWAIT) > 0)
		;

	/* The batch step is left alone and tells nothing. */
	step_id = SLURM_BATCH_SCRIPT;
	job_argv[0] = (char *) "python";
	assert(slurm_spank_task_init(NULL, 2, av) == 0 && strcmp(job_argv[0], "python") == 0);
	assert(slurm_spank_task_exit(NULL, 2, av) == 0);
	assert(recv(fd, data, sizeof(data), MSG_DONTWAIT) < 0);

	/* An agent that is there already is not wrapped; one that is missing is reported, and the command stays. */
	job_argv[0] = (char *) "/opt/bin/unicron-agent";
	agent_wrap(NULL, "/bin/true", 0);
	assert(strcmp(job_argv[0], "/opt/bin/unicron-agent") == 0 && messages == 0);
	job_argv[0] = (char *) "python";
	agent_wrap(NULL, "/nonexistent/agent", 0);
	assert(strcmp(job_argv[0], "python") == 0 && messages == 1);

	/* Neither is one that does not run, as in a container of another system. */
	agent_set_launcher("/bin/false");
	agent_wrap(NULL, "/bin/true", 0);
	assert(strcmp(job_argv[0], "python") == 0 && messages == 2);

	/* Without the launcher nothing is changed either. */
	agent_set_launcher("/nonexistent/unicron-launch");
	agent_wrap(NULL, "/bin/true", 0);
	assert(strcmp(job_argv[0], "python") == 0 && messages == 3);
	close(fd);
}

/* Names are looked up too; one that does not exist leaves the plugin silent. */
static void test_names(void)
{
	struct notice notice = { .kind = "task_exit", .job = "1" };

	notify_set_controller("tcp://localhost:9");
	notify_send(&notice);
	notify_set_controller("tcp://no-such-host.invalid:9");
	notify_send(&notice);
	notify_set_controller("tcp://127.0.0.1:9,rubbish,tcp://127.0.0.2:9");
	notify_send(&notice);
	notify_set_controller("rubbish");
	notify_send(&notice);
}

int main(int argc, char **argv)
{
	/* With an address: a hint goes there, and nothing else is done. */
	if (argc > 1) {
		struct notice notice = { .kind = "task_exit", .job = "1" };

		notify_set_controller(argv[1]);
		notify_send(&notice);
		return (0);
	}
	test_msgpack();
	test_notice();
	test_numbers();
	test_addresses();
	test_config();
	test_commands();
	test_front_ends();
	test_servers();
	test_starters();
	test_many_wrappers();
	test_judge();
	test_batch_scripts();
	test_reading_is_bounded();
	test_submissions();
	test_what_is_said();
	context = S_CTX_LOCAL;
	args_register(NULL);
	test_choice();
	test_step();
	test_nested_submission();
	test_names();
	printf("ok\n");
	return (0);
}
