/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "inherit.h"

#define MOST_BYTES 1024    /* of a value: args.h */

extern char **environ;

void inherit_set(spank_t sp, const char *name, const char *value)
{
	char mark[64], before[MOST_BYTES];
	const char *now = before;

	if (sp == NULL)
		now = getenv(name);
	else if (spank_getenv(sp, name, before, sizeof(before)) != ESPANK_SUCCESS)
		now = NULL;
	if (now != NULL && strcmp(now, value) == 0)
		return;
	snprintf(mark, sizeof(mark), UNICRON_MARK "%s", name);
	if (sp == NULL) {
		setenv(name, value, 1);
		setenv(mark, value, 1);
	} else {
		spank_setenv(sp, name, value, 1);
		spank_setenv(sp, mark, value, 1);
	}
}

/* The next variable whose name begins so, or NULL. Its name goes into `name`. */
static const char *find(const char *beginning, char name[256])
{
	for (char **entry = environ; entry != NULL && *entry != NULL; ++entry) {
		const char *value = strchr(*entry, '=');

		if (strncmp(*entry, beginning, strlen(beginning)) == 0 && value != NULL && value - *entry < 256) {
			snprintf(name, 256, "%.*s", (int) (value - *entry), *entry);
			return (value + 1);
		}
	}
	return (NULL);
}

bool inherit_forget(void)
{
	/* The job's options as Slurm hands them on: to slurmstepd, and to prologs. */
	static const char *const options[] = { "_SLURM_SPANK_OPTION_unicron_", "SLURM_SPANK__SLURM_SPANK_OPTION_unicron_" };
	static const char *const of_ranks[] = { "UNICRON_COUNTERS", "UNICRON_GENERATION", "UNICRON_STACKS" };
	const char *value, *now, *by_default = getenv("UNICRON_BY_DEFAULT");
	bool asked = false, defaulted = by_default != NULL && strcmp(by_default, "1") == 0;
	char name[256];

	for (size_t i = 0; i < sizeof(options) / sizeof(*options); ++i)
		while (find(options[i], name) != NULL)
			unsetenv(name);
	for (size_t i = 0; i < sizeof(of_ranks) / sizeof(*of_ranks); ++i)
		unsetenv(of_ranks[i]);
	while ((value = find(UNICRON_MARK, name)) != NULL) {
		const char *marked = name + strlen(UNICRON_MARK);

		now = getenv(marked);
		if (now != NULL && strcmp(now, value) == 0) {
			asked = asked || (strcmp(marked, "UNICRON") == 0 && strcmp(now, "1") == 0 && !defaulted);
			unsetenv(marked);
		}
		unsetenv(name);
	}
	return (asked);
}
