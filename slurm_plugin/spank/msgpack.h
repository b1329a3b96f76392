/* SPDX-License-Identifier: Apache-2.0 */
/* The few MessagePack types that the plugin's datagrams need, written into a caller's buffer: no allocation. */
#ifndef UNICRON_MSGPACK_H
#define UNICRON_MSGPACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct msgpack {
	unsigned char *data;
	size_t size;
	size_t used;
	bool overflow;     /* something did not fit: the buffer holds no valid message */
};

void msgpack_init(struct msgpack *out, void *data, size_t size);
void msgpack_map(struct msgpack *out, unsigned entries);    /* up to 15 entries; their keys and values follow */
void msgpack_text(struct msgpack *out, const char *text);   /* up to 65535 bytes */
void msgpack_int(struct msgpack *out, int64_t value);

#endif
