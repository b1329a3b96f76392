/* SPDX-License-Identifier: Apache-2.0 */
/* What the plugin and unicron-launch agree on. */
#ifndef UNICRON_LAUNCH_H
#define UNICRON_LAUNCH_H

#define UNICRON_LAUNCHER "unicron-launch"
/* The number of all that it and the agent tell each other, this file's and wait.h's (unicron_detector/formats.py), and where the agent finds it: */
#define UNICRON_LAUNCH_NUMBER "1"
#define UNICRON_LAUNCH_FORMAT "_UNICRON_LAUNCH"
#define UNICRON_LAUNCH_TRY "--try"    /* its only argument: it ends with 0 */
/* Where its first two arguments are not these: */
#define UNICRON_LAUNCH_AGENT "UNICRON_LAUNCH_AGENT"         /* path of the agent */
#define UNICRON_LAUNCH_COMMAND "UNICRON_LAUNCH_COMMAND"     /* the first word of the user's command */
/* Descriptors, where several tasks of a node have one agent (tasks.h): */
#define UNICRON_TASKS "_UNICRON_TASKS"    /* the node's first task becomes the agent: the others' pairs, with commas between */
#define UNICRON_TASK "_UNICRON_TASK"      /* another one waits for its rank */

#endif
