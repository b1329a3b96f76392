/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "msgpack.h"

void msgpack_init(struct msgpack *out, void *data, size_t size)
{
	out->data = data;
	out->size = size;
	out->used = 0;
	out->overflow = false;
}

static void put(struct msgpack *out, const void *bytes, size_t count)
{
	if (out->overflow || count > out->size - out->used) {
		out->overflow = true;
		return;
	}
	memcpy(out->data + out->used, bytes, count);
	out->used += count;
}

/* A type byte and `width` bytes of the value, the most significant first. */
static void put_number(struct msgpack *out, unsigned char type, uint64_t value, size_t width)
{
	unsigned char bytes[9] = { type };

	for (size_t i = 0; i < width; ++i)
		bytes[1 + i] = (unsigned char) (value >> (8 * (width - 1 - i)));
	put(out, bytes, 1 + width);
}

void msgpack_map(struct msgpack *out, unsigned entries)
{
	unsigned char type = (unsigned char) (0x80 | entries);

	if (entries > 15)
		out->overflow = true;
	put(out, &type, 1);
}

void msgpack_text(struct msgpack *out, const char *text)
{
	size_t length = strlen(text);
	unsigned char type = (unsigned char) (0xa0 | length);

	if (length < 32)
		put(out, &type, 1);
	else if (length <= UINT8_MAX)
		put_number(out, 0xd9, length, 1);
	else if (length <= UINT16_MAX)
		put_number(out, 0xda, length, 2);
	else
		out->overflow = true;
	put(out, text, length);
}

void msgpack_int(struct msgpack *out, int64_t value)
{
	unsigned char type = (unsigned char) value;

	if (value >= -32 && value <= 127)
		put(out, &type, 1);
	else if (value >= 0 && value <= UINT8_MAX)
		put_number(out, 0xcc, (uint64_t) value, 1);
	else if (value >= 0 && value <= UINT16_MAX)
		put_number(out, 0xcd, (uint64_t) value, 2);
	else if (value >= 0 && value <= UINT32_MAX)
		put_number(out, 0xce, (uint64_t) value, 4);
	else if (value >= INT8_MIN && value < 0)
		put_number(out, 0xd0, (uint64_t) value, 1);
	else if (value >= INT16_MIN && value < 0)
		put_number(out, 0xd1, (uint64_t) value, 2);
	else if (value >= INT32_MIN && value < 0)
		put_number(out, 0xd2, (uint64_t) value, 4);
	else
		put_number(out, 0xd3, (uint64_t) value, 8);
}
