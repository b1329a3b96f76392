/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "command.h"
#include "programs.inc"
#include "shell_text.h"

#define MOST_WRAPPERS 16      /* that are looked through, one inside another */
#define MOST_COMMANDS 64      /* of a shell's -c whose scripts are read */

/*
 * The words that programs.inc does not have. Of its launchers, `starters` start the ranks of all nodes, or are those that the agent does
 * not replace: srun would start each of them many times.
 */

/* Programs of the system's that train nothing, whatever their arguments are. None of them runs another program,
 * except for awk: judge_awk. */
static const char *const utilities[] = {
	"[", "amd-smi", "awk", "aws", "basename", "cat", "chgrp", "chmod", "chown", "cksum", "cmp", "cp", "curl", "cut",
	"date", "dcgmi", "dd", "df", "diff", "dig", "dirname", "dmesg", "du", "echo", "egrep", "expand", "expr", "false",
	"fgrep", "fold", "free", "getent", "git", "gpustat", "grep", "groups", "gsutil", "gunzip", "gzip", "head", "hexdump",
	"hf", "host", "hostid", "hostname", "hostnamectl", "htop", "huggingface-cli", "hwloc-ls", "ibdev2netdev", "ibstat",
	"ibstatus", "id", "ifconfig", "install", "iostat", "ip", "ipcrm", "ipcs", "kill", "killall", "ldd", "less", "link",
	"ln", "locale", "logger", "logname", "ls", "lsblk", "lscpu", "lsmem", "lsmod", "lsof", "lspci", "lstopo", "md5sum",
	"mkdir", "mkfifo", "mktemp", "mlflow", "more", "mount", "mpstat", "mv", "netstat", "nproc", "nslookup", "nvidia-smi",
	"nvitop", "nvtop", "od", "paste", "pgrep", "pidstat", "ping", "pip", "pip3", "pkill", "printenv", "printf", "ps",
	"pwd", "quota", "rclone", "readlink", "realpath", "renice", "rm", "rmdir", "rocm-smi", "rocminfo", "rsync", "s5cmd",
	"sacct", "sar", "sattach", "sbcast", "scancel", "scontrol", "scp", "sed", "seq", "sha1sum", "sha256sum", "sha512sum",
	"shred", "sinfo", "sleep", "sort", "split", "sprio", "squeue", "ss", "sshare", "sstat", "stat", "stty", "sum",
	"sync", "sysctl", "tac", "tail", "tar", "tee", "test", "timedatectl", "top", "touch", "tr", "tree",
	"true", "truncate", "tty", "umount", "uname", "uniq", "unlink", "unxz", "unzip", "unzstd", "uptime", "users",
	"uuidgen", "vmstat", "wandb", "wc", "wget", "whereis", "which", "who", "whoami", "xz", "yes", "zip", "zstd",
};

/* Built into a shell. "." and source run a script: plain_command. */
static const char *const builtins[] = {
	":", "[[", "alias", "break", "case", "cd", "continue", "declare", "done", "esac", "exit", "export", "fi", "for", "function",
	"hash", "in", "jobs", "let", "local", "ml", "module", "popd", "pushd", "read", "readonly", "return", "set", "shift", "shopt",
	"trap", "type", "typeset", "ulimit", "umask", "unalias", "unset", "wait",
};

/* python, python3, python3.11, python3.11-dbg, pypy3, ipython; or a script of Python's. */
static bool is_python(const char *word)
{
	static const char *const names[] = { "ipython", "python", "pypy" };
	const char *name = base_name(word);

	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); ++i) {
		size_t length = strlen(names[i]);

		if (strncmp(name, names[i], length) != 0)
			continue;
		length += strspn(name + length, "0123456789.td");
		if (name[length] == '\0' || strcmp(name + length, "-dbg") == 0)
			return (true);
	}
	return (ends_with(name, ".py") || ends_with(name, ".pyz") || ends_with(name, ".pex"));
}

enum command_kind command_of_word(const char *word)
{
	const char *name = base_name(word);

	if (IS_ONE_OF(name, launchers) || IS_ONE_OF(name, starters) || IS_ONE_OF(word, launcher_modules) || is_python(word))
		return (COMMAND_TRAINS);
	return (IS_ONE_OF(name, shells) ? COMMAND_SHELL : IS_ONE_OF(name, utilities) ? COMMAND_UTILITY : COMMAND_MAY_TRAIN);
}

/* Takes one word of a command into account. */
static void judge_word(struct command *found, const char *word)
{
	if (command_of_word(word) == COMMAND_TRAINS) {
		found->kind = COMMAND_TRAINS;
		found->server = NULL;
	}
	for (size_t i = 0; i < sizeof(starters) / sizeof(*starters) && found->starter == NULL; ++i)
		if (strcmp(base_name(word), starters[i]) == 0)
			found->starter = starters[i];
}

/* The one of a table of servers that this program, with the next word for its command, is. */
static const char *server_of(const char *name, const char *next, const char *const *table, size_t count)
{
	for (size_t i = 0; i < count; ++i) {
		size_t length = strcspn(table[i], " ");

		if (strncmp(name, table[i], length) == 0 && name[length] == '\0' &&
		    (table[i][length] == '\0' || (next != NULL && strcmp(next, table[i] + length + 1) == 0)))
			return (table[i]);
	}
	return (NULL);
}

const char *command_server(char *const argv[], bool behind_option)
{
	bool python = argv[0] != NULL && is_python(argv[0]), module = false;
	const char *found;

	if (python && ends_with(argv[0], ".py"))
		return (NULL);
	for (argv += python; python && *argv != NULL && (*argv)[0] == '-' && !module; ++argv) {
		module = strcmp(*argv, "-m") == 0;
		if (strcmp(*argv, "-c") == 0)
			return (NULL);
		if ((strcmp(*argv, "-W") == 0 || strcmp(*argv, "-X") == 0) && argv[1] != NULL)
			++argv;
	}
	if (*argv == NULL)
		return (NULL);
	found = module ? server_of(argv[0], argv[1], server_modules, sizeof(server_modules) / sizeof(*server_modules)) :
		server_of(base_name(argv[0]), argv[1], servers, sizeof(servers) / sizeof(*servers));
	return (found != NULL && behind_option && !python && strchr(found, ' ') == NULL ? NULL : found);
}

static void set_server(struct command *found, const char *server)
{
	*found = (struct command) { .kind = COMMAND_SERVES, .server = server };
}

/* Takes the words of a shell's text into account, except for comments; quoted words count too, for eval and bash -c. */
static void judge_text(struct command *found, char *text)
{
	char *rest, *word;

	for (char *line = strtok_r(text, "\n", &rest); line != NULL; line = strtok_r(NULL, "\n", &rest)) {
		char *inner;

		if (line[strspn(line, " \t")] == '#')
			continue;
		for (word = strtok_r(line, " \t\r;&|()<>\"'`$={}", &inner); word != NULL;
		     word = strtok_r(NULL, " \t\r;&|()<>\"'`$={}", &inner))
			judge_word(found, word);
	}
}

bool command_is_builtin(const char *word)
{
	return (IS_ONE_OF(word, builtins) || isdigit((unsigned char) word[0]));
}

static char search_path[4096];

void command_set_path(const char *path)
{
	snprintf(search_path, sizeof(search_path), "%s", path != NULL ? path : "");
}

static void judge_script(struct command *found, const char *path, bool reads_text);
static char *const *inner_command(char *const argv[]);

/* Whether a command, behind its wrappers, is a front end: the first of PATH is Python's, or a shell script that trains. */
static bool is_front_end(char *const argv[])
{
	char folders[sizeof(search_path)], file[sizeof(search_path) + 256], *rest;
	const char *name;

	for (int i = 0; i < MOST_WRAPPERS && *argv != NULL && IS_ONE_OF(base_name(*argv), wrappers); ++i)
		argv = inner_command(argv);
	name = *argv;
	if (name == NULL || strchr(name, '/') != NULL || strchr("-$", name[0]) != NULL || strlen(name) > 255)
		return (false);
	strcpy(folders, search_path);
	for (char *folder = strtok_r(folders, ":", &rest); folder != NULL; folder = strtok_r(NULL, ":", &rest)) {
		struct command found = { .kind = COMMAND_MAY_TRAIN };

		snprintf(file, sizeof(file), "%s/%s", folder, name);
		if (access(file, X_OK) != 0)
			continue;
		judge_script(&found, file, false);
		return (found.kind == COMMAND_TRAINS);
	}
	return (false);
}

/* `source env/bin/activate`, `conda activate env`: no program of a server's text. */
static bool sets_up(char *const words[])
{
	return (strcmp(words[0], ".") == 0 || strcmp(words[0], "source") == 0 || (words[1] != NULL && strcmp(words[1], "activate") == 0));
}

/*
 * Judges all commands of a shell's text: utilities alone, a server with its set-up, or something else. The first one that trains goes
 * into `found`; scripts that they run are read.
 */
static struct command judge_commands(struct command *found, char *text)
{
	char *words[MOST_WORDS + 1], *rest = NULL;
	struct command server = { .kind = COMMAND_SHELL };
	bool helps = true, serves = true;
	int count, left = MOST_COMMANDS;

	blank_comments(text);
	blank_syntax(text);
	for (count = next_command(text, &rest, words); count >= 0 && left > 0 && found->kind != COMMAND_TRAINS;
	     count = next_command(NULL, &rest, words), --left) {
		struct command run = { .kind = COMMAND_UTILITY };

		if (count > 0 && !command_is_builtin(words[0]))
			run = command_of(words, false);
		if (run.kind == COMMAND_SERVES)
			server = run;
		helps = helps && run.kind == COMMAND_UTILITY;
		serves = serves && (run.kind <= COMMAND_SERVES || (run.kind != COMMAND_TRAINS && sets_up(words)));
		if (run.kind == COMMAND_TRAINS)
			*found = run;
		else if (run.kind == COMMAND_MAY_TRAIN && is_front_end(words))
			found->kind = COMMAND_MAY_TRAIN;    /* as without the shell */
	}
	if (left > 0 && helps)
		server.kind = COMMAND_UTILITY;
	else if (left == 0 || !serves)
		server.kind = COMMAND_SHELL;
	return (server);
}

static void judge_copy(struct command *found, const char *text)
{
	char *copy = strdup(text);

	if (copy != NULL)
		judge_text(found, copy);
	free(copy);
}

/* Judges the text that a shell would run. */
static void judge_shell_text(struct command *found, char *text, bool reads_text)
{
	struct command named = { .kind = COMMAND_SHELL }, all;

	judge_copy(found, text);
	if (!reads_text) {
		found->kind = found->kind == COMMAND_TRAINS ? COMMAND_TRAINS : COMMAND_SHELL;
		return;
	}
	all = judge_commands(&named, text);
	if (all.kind == COMMAND_SERVES)
		*found = all;
	else if (found->kind != COMMAND_TRAINS)
		found->kind = all.kind == COMMAND_UTILITY ? all.kind : named.kind;
	if (found->starter == NULL)
		found->starter = named.starter;
}

static void judge_script(struct command *found, const char *path, bool reads_text)
{
	char *text = read_beginning(path);

	if (text != NULL && strncmp(text, "#!", 2) == 0) {      /* its interpreter is a command, too */
		char *rest = text + 2, *line = strsep(&rest, "\n"), *inner;

		for (char *word = strtok_r(line, " \t\r", &inner); word != NULL; word = strtok_r(NULL, " \t\r", &inner))
			judge_word(found, word);
		if (rest != NULL && found->kind != COMMAND_TRAINS)    /* the text of one of Python's says nothing more */
			judge_shell_text(found, rest, reads_text);
	} else if (text != NULL) {
		judge_shell_text(found, text, reads_text);
	}
	free(text);
}

/* Skips a shell's options at the beginning of argv. has_text: whether they hold -c. */
static char *const *skip_shell_options(char *const argv[], bool *has_text)
{
	*has_text = false;
	while (*argv != NULL && ((*argv)[0] == '-' || (*argv)[0] == '+')) {
		const char *option = *argv++, *letter = option + 1;
		int values = 0;

		if (strcmp(option, "-") == 0 || strcmp(option, "--") == 0)
			break;
		if (option[1] == '-') {
			values = strcmp(option, "--rcfile") == 0 || strcmp(option, "--init-file") == 0;
		} else {
			bool of_bash = option[strspn(option + 1, "abcefhiklmnoprstuvxBCDEHOPT") + 1] == '\0';

			*has_text = *has_text || (option[0] == '-' && of_bash && strchr(letter, 'c') != NULL);
			for (; of_bash && *letter != '\0'; ++letter)
				values += *letter == 'o' || *letter == 'O';    /* each of them takes the next word */
		}
		for (; values > 0 && *argv != NULL; --values)
			++argv;
	}
	return (argv);
}

/* A shell script may run its arguments: exec "$@". */
static void judge_arguments(struct command *found, char *const argv[])
{
	for (int i = 1; argv[0] != NULL && argv[i] != NULL; ++i)
		judge_word(found, argv[i]);
}

/* A shell's command: the text behind -c, or its script. */
static void judge_shell(struct command *found, char *const argv[], bool reads_text)
{
	bool has_text;
	char *const *words = skip_shell_options(argv + 1, &has_text), *text;

	if (*words != NULL && !has_text) {
		judge_script(found, *words, reads_text);
	} else if (*words != NULL && (text = strdup(*words)) != NULL) {
		judge_shell_text(found, text, reads_text);
		free(text);
	}
	judge_arguments(found, words);
}

/* Where a wrapper's command begins: options, numbers (of cores, of seconds) and settings come before it. */
static char *const *inner_command(char *const argv[])
{
	for (++argv; *argv != NULL; ++argv)
		if ((*argv)[0] != '-' && !isdigit((unsigned char) (*argv)[0]) && strchr(*argv, '=') == NULL)
			break;
	return (argv);
}

static bool has_option(char *const argv[], char *const *until)
{
	for (; argv < until; ++argv)
		if ((*argv)[0] == '-')
			return (true);
	return (false);
}

/* Not a program of the user's that has the name of one of the system's. */
static bool is_of_the_system(const char *word)
{
	return (strchr(word, '/') == NULL || strncmp(word, "/bin/", 5) == 0 || strncmp(word, "/sbin/", 6) == 0 ||
		strncmp(word, "/usr/", 5) == 0);
}

/* An awk is judged by the programs that its own program runs. */
static void judge_awk(struct command *found, char *const argv[])
{
	for (int i = 1; argv[i] != NULL; ++i) {
		const char *call = strstr(argv[i], "system");

		if (call == NULL || call[6 + strspn(call + 6, " ")] != '(')
			continue;
		if (found->kind == COMMAND_UTILITY)
			found->kind = COMMAND_MAY_TRAIN;
		judge_copy(found, argv[i]);
	}
}

/* Judges a command that is no wrapper. */
static struct command plain_command(char *const argv[], bool reads_text)
{
	struct command found = { .kind = COMMAND_MAY_TRAIN };
	const char *name = base_name(argv[0]), *server = command_server(argv, false);

	if (server != NULL) {
		set_server(&found, server);
	} else if (is_of_the_system(argv[0]) && IS_ONE_OF(name, utilities)) {
		found.kind = COMMAND_UTILITY;
		if (strcmp(name, "awk") == 0)
			judge_awk(&found, argv);
	} else if (IS_ONE_OF(name, shells) || strcmp(argv[0], ".") == 0 || strcmp(argv[0], "source") == 0) {
		judge_shell(&found, argv, reads_text);
	} else {
		judge_word(&found, argv[0]);
		for (int i = 1; found.starter != NULL && argv[i] != NULL && server == NULL; ++i)
			server = command_server(argv + i, true);
		if (server != NULL) {
			set_server(&found, server);
		} else if (found.kind == COMMAND_TRAINS) {
			for (int i = 1; argv[i] != NULL; ++i)
				if (strcmp(argv[i - 1], "-m") == 0)
					judge_word(&found, argv[i]);
		} else if (strchr(argv[0], '/') != NULL) {
			judge_script(&found, argv[0], reads_text);
			if (found.kind != COMMAND_MAY_TRAIN)
				judge_arguments(&found, argv);
		}
	}
	return (found);
}

/* script -qc 'python train.py' */
static bool is_text_option(const char *word)
{
	return (word[0] == '-' && (strcmp(word, "--command") == 0 || (word[1] != '-' && ends_with(word, "c"))));
}

/* Judges the words behind a wrapper, wherever its command begins; the first shell among them is followed. */
static void judge_inner_words(struct command *found, char *const argv[], char *const *inner, bool reads_text)
{
	bool followed = false;
	const char *server;

	for (++argv; found->kind != COMMAND_TRAINS && *argv != NULL; ++argv) {
		if (is_text_option(argv[-1])) {
			char *text = strdup(*argv);

			if (text != NULL)
				judge_shell_text(found, text, reads_text);
			free(text);
			reads_text = false;
		} else if (argv >= inner && !followed && IS_ONE_OF(base_name(*argv), shells)) {
			followed = true;
			judge_shell(found, argv, reads_text);
		} else if (argv >= inner && (server = command_server(argv, !ends_with(argv[-1], ".sif"))) != NULL) {
			set_server(found, server);
			return;
		} else if (argv >= inner) {
			judge_word(found, *argv);
		}
	}
}

/* A user chooses how many words and wrappers there are: each word is visited a few times at the most. */
struct command command_of(char *const argv[], bool reads_text)
{
	struct command found = { .kind = COMMAND_MAY_TRAIN };
	char *const *command = argv, *const *inner = NULL;

	for (int i = 0; i < MOST_WRAPPERS && *command != NULL && IS_ONE_OF(base_name(*command), wrappers); ++i) {
		char *const *next = inner_command(command);

		if (*next == NULL && strcmp(base_name(*command), "env") == 0)
			found.kind = COMMAND_UTILITY;    /* it prints its variables */
		command = next;
		if (inner == NULL)
			inner = next;
	}
	if (*command != NULL && !IS_ONE_OF(base_name(*command), wrappers))
		found = plain_command(command, reads_text);
	if (inner == NULL)
		return (found);
	/* An option of a wrapper's may have had this word for itself: then the inner command comes later. */
	if (found.kind == COMMAND_UTILITY && *inner != NULL && has_option(argv, command))
		found.kind = COMMAND_MAY_TRAIN;
	judge_inner_words(&found, argv, inner, reads_text);
	return (found);
}
