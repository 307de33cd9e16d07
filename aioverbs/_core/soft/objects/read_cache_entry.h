/* Grant of the read cache that a queue pair keeps: see soft/fabric/read_cache.h. */
#ifndef AIOVERBS_SOFT_OBJECTS_READ_CACHE_ENTRY_H
#define AIOVERBS_SOFT_OBJECTS_READ_CACHE_ENTRY_H

#include <stdint.h>

enum { SOFT_READ_CACHE_ENTRIES = 16 }; /* entries of a queue pair, of different keys */

/* Versions that were noted before the request was sent. */
struct soft_read_cache_versions {
    uint64_t all, key, qp;
};

struct soft_read_cache_entry {
    uint32_t key;
    uint32_t psn;             /* pending entry: last packet of its answer */
    uint64_t owner_serial;    /* serial number of the soft_read_cache_owner; 0: the entry is empty */
    uint64_t address, length; /* range that `key` leads to */
    uint8_t *memory;          /* mapping of the range; NULL: it is not mapped here */
    struct soft_read_cache_versions versions;
};

#endif
