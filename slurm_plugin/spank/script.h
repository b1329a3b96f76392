/* SPDX-License-Identifier: Apache-2.0 */
#ifndef UNICRON_SCRIPT_H
#define UNICRON_SCRIPT_H

#include <stdbool.h>

/* The contents of a batch script, with the files that its commands name. */
struct script {
	bool step;          /* an srun that may train, or something that may call one */
	bool unknown;       /* a program of which nothing is known */
	bool agent;         /* unicron-agent, which a script may call by itself */
	bool cut;           /* there are more files than are read */
	char word[64];      /* of the first training without srun; empty for none */
	char starter[64];   /* a launcher that must not stand behind srun; empty for none */
	char server[64];    /* that trains nothing; empty for none */
	char sweep[64];     /* the file that names SLURM_ARRAY_TASK_ID; empty for none */
};

/* False where there is none to be read. */
bool script_read(const char *path, struct script *script);

#endif
