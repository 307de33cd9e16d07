/* Numbers as in frames: little-endian, at any alignment. */
#ifndef AIOVERBS_SOFT_BASE_ENDIAN_H
#define AIOVERBS_SOFT_BASE_ENDIAN_H

#include <endian.h>
#include <stdint.h>
#include <string.h>

static inline void soft_put16(uint8_t *to, uint16_t value)
{
    value = htole16(value);
    memcpy(to, &value, sizeof(value));
}

static inline void soft_put32(uint8_t *to, uint32_t value)
{
    value = htole32(value);
    memcpy(to, &value, sizeof(value));
}

static inline void soft_put64(uint8_t *to, uint64_t value)
{
    value = htole64(value);
    memcpy(to, &value, sizeof(value));
}

static inline uint16_t soft_get16(const uint8_t *from)
{
    uint16_t value;

    memcpy(&value, from, sizeof(value));
    return le16toh(value);
}

static inline uint32_t soft_get32(const uint8_t *from)
{
    uint32_t value;

    memcpy(&value, from, sizeof(value));
    return le32toh(value);
}

static inline uint64_t soft_get64(const uint8_t *from)
{
    uint64_t value;

    memcpy(&value, from, sizeof(value));
    return le64toh(value);
}

#endif
