/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the plugin sets in a job's environment concerns this job. Its script and its steps hand their environment on to the jobs that they
 * submit, though, so each of these variables has a mark beside it, with its value: what is as the mark says is not the user's own.
 */
#ifndef UNICRON_INHERIT_H
#define UNICRON_INHERIT_H

#include "unicron.h"

#define UNICRON_MARK "_UNICRON_OF_JOB_"    /* before the variable's name; agent/start/untouched.py */

/* Sets a variable, with its mark, unless it has this value: in this process, or, where sp is not NULL, in the job's environment. */
void inherit_set(spank_t sp, const char *name, const char *value);

/*
 * Where a job is submitted, before its options are read: forgets what concerns the job that submits it. True when that job's user asked
 * for Unicron.
 */
bool inherit_forget(void);

#endif
