/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shell_text.h"

#define SCRIPT_BYTES 65536        /* that are read of a script */
#define MOST_OPENED 2048          /* files, those that are not there included */
#define MOST_READ (256 * 1024)    /* bytes of all files: some 30 ms to judge */

static int may_open = MOST_OPENED;
static size_t may_read = MOST_READ;
static bool cut;

/* Words of a shell's behind which a command begins. */
static const char *const keywords[] = { "!", "do", "elif", "else", "exec", "if", "then", "time", "until", "while" };

bool is_one_of(const char *word, const char *const *list, size_t count)
{
	for (size_t i = 0; i < count; ++i)
		if (word[0] == list[i][0] && strcmp(word, list[i]) == 0)    /* scripts have many words */
			return (true);
	return (false);
}

const char *base_name(const char *path)
{
	const char *slash = strrchr(path, '/');

	return (slash ? slash + 1 : path);
}

bool ends_with(const char *word, const char *end)
{
	size_t length = strlen(word), of_end = strlen(end);

	return (length > of_end && strcmp(word + length - of_end, end) == 0);
}

void reading_begin(void)
{
	may_open = MOST_OPENED;
	may_read = MOST_READ;
	cut = false;
}

bool reading_is_cut(void)
{
	return (cut);
}

char *read_beginning(const char *path)
{
	struct stat about;
	char *text = NULL;
	ssize_t got = -1;
	size_t most = may_read < SCRIPT_BYTES ? may_read : SCRIPT_BYTES;
	int fd;

	cut = cut || may_open == 0 || most == 0;
	if (cut)
		return (NULL);
	--may_open;
	fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0)
		return (NULL);
	if (fstat(fd, &about) == 0 && S_ISREG(about.st_mode) && (text = malloc(SCRIPT_BYTES + 1)) != NULL)
		got = read(fd, text, most);
	close(fd);
	may_read -= got > 0 ? (size_t) got : 0;
	if (got < 0 || memchr(text, '\0', (size_t) got) != NULL) {
		free(text);
		return (NULL);
	}
	text[got] = '\0';
	return (text);
}

void blank_comments(char *text)
{
	for (char *at = text; *at != '\0'; ++at) {
		if (strncmp(at, "\\\n", 2) == 0)
			at[0] = at[1] = ' ';
		else if (*at == '#' && (at == text || isspace((unsigned char) at[-1])))
			memset(at, ' ', strcspn(at, "\n"));
	}
}

void blank_syntax(char *text)
{
	for (char *at = text; *at != '\0'; ++at) {
		if (strncmp(at, "${", 2) == 0)
			memset(at + 1, '_', strcspn(at + 1, "} \t\n") + (at[1 + strcspn(at + 1, "} \t\n")] == '}'));
		else if (*at == '&' && (at[1] == '>' || (at > text && strchr("<>", at[-1]) != NULL)))
			*at = ' ';
	}
}

int next_command(char *text, char **rest, char *words[MOST_WORDS + 1])
{
	char *line = strtok_r(text, "\n;&|(){}`", rest), *inner;
	int count = 0;

	if (line == NULL)
		return (-1);
	for (char *word = strtok_r(line, " \t\r\"'<>", &inner); word != NULL && count < MOST_WORDS;
	     word = strtok_r(NULL, " \t\r\"'<>", &inner))
		if (count > 0 || !(IS_ONE_OF(word, keywords) || strchr(word, '=') != NULL))
			words[count++] = word;
	words[count] = NULL;
	return (count);
}
