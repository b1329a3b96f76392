/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hints to the controller: one UDP datagram each, to every address of each host in its TCP addresses, and the same port number.
 * A datagram may be lost or forged, so the controller verifies what it says; the plugin never waits for anything and never
 * fails for it.
 */
#ifndef UNICRON_NOTIFY_H
#define UNICRON_NOTIFY_H

#include <stdint.h>

#include "unicron.h"

#define UNICRON_HINT_NUMBER 1             /* of the message (unicron_detector/formats.py) */
#define UNICRON_NODE_MAX 256
#define UNICRON_CONTROLLER_ADDRESSES 8    /* of all names; the others get no hint */

struct notice {
	const char *kind;               /* "task_exit" */
	char job[24];                   /* array job id, or the job id where there is no array */
	int64_t element;                /* array task id, or 0 */
	int64_t slurm_id;               /* the job id proper, which each array element has for itself */
	char node[UNICRON_NODE_MAX];
	int status;                     /* as of wait(2) */
};

/* Remembers where to send: addresses with commas between them. Looks each host name up for half a second at most; a
 * numeric address costs nothing. */
void notify_set_controller(const char *address);

/* Fills in everything but kind and status, from the step. */
void notice_identify(spank_t sp, struct notice *notice);

/* The datagram's bytes; returns their number, 0 when they do not fit. */
size_t notice_encode(const struct notice *notice, void *data, size_t size);

void notify_send(const struct notice *notice);

#endif
