/* SPDX-License-Identifier: Apache-2.0 */
/* unicron-launch in a task that waits for its rank, and what it and the agent tell each other (agent/connections/step_tasks.py). */
#ifndef UNICRON_WAIT_H
#define UNICRON_WAIT_H

/*
 * TELL_RUN is the same in every release: with it an agent that does not know this launcher's number lets the command run.
 *
 * Messages, each a packet whose first byte says what it is. From the agent's side:
 *   A pid      unicron-launch in the node's first task, before it becomes the agent
 *   H          hand over what this task is: until the agent asks for it, nothing is on its way that would keep the task's output open
 *   R          run the command yourself, nothing protects it; with a descriptor: of a file with the environment for it
 *   E code     your rank has ended: with this exit status, or, below 0, by this signal
 * From the task: "cpus\ndevices", both with commas between, and three descriptors: its standard output and error, and a file with
 * its environment.
 */
#define TELL_AGENT 'A'
#define TELL_HAND 'H'
#define TELL_RUN 'R'
#define TELL_END 'E'

/* To the tasks by the agent's ends `list`, text with commas between. What has said TELL_RUN has nothing more to say, and is closed. */
void tell_tasks(const char *list, const char *message);

/* Waits for this task's rank, and ends as it does; returns where the command is to run unprotected, its environment being set. */
void wait_for_rank(int channel);

#endif
