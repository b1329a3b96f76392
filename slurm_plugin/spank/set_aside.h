/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The user's variables that would be taken by the agent's Python or its loader, and are for the ranks': the agent starts without
 * them, under other names, and gives them back to the ranks (agent/start/entry.py).
 */
#ifndef UNICRON_SET_ASIDE_H
#define UNICRON_SET_ASIDE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UNICRON_USERS "_UNICRON_USERS_"    /* in front of such a variable's name */

extern char **environ;

/* Gives every variable whose name begins with one prefix another prefix. */
static inline void rename_variables(const char *from, const char *to)
{
	size_t length = strlen(from);

	for (char **entry = environ; entry != NULL && *entry != NULL;) {
		char *name = *entry, *changed;
		size_t size = strlen(to) + strlen(name) - length + 1;

		if (strncmp(name, from, length) != 0 || strchr(name, '=') == NULL || (changed = malloc(size)) == NULL) {
			++entry;
			continue;
		}
		snprintf(changed, size, "%s%s", to, name + length);
		if (putenv(changed) != 0) {
			free(changed);
			return;
		}
		name = strdup(name);      /* putenv may have moved the list, not its texts */
		if (name == NULL)
			return;
		*strchr(name, '=') = '\0';
		unsetenv(name);
		free(name);
		entry = environ;
	}
}

#endif
