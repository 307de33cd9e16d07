/* What a queue pair keeps of a licence to read: see soft/fabric/read_cache.h. */
#ifndef AIOVERBS_SOFT_OBJECTS_READ_CACHE_ENTRY_H
#define AIOVERBS_SOFT_OBJECTS_READ_CACHE_ENTRY_H

#include <stdint.h>

enum { SOFT_READ_CACHE_ENTRIES = 4 }; /* that a queue pair has at a time, of different keys */

/* What the words were. */
struct soft_read_cache_versions {
    uint64_t all, key, qp;
};

struct soft_read_cache_entry {
    uint32_t key;
    uint32_t psn;             /* of one that is asked for: of its answer */
    uint64_t owner_serial;    /* whose words these are; 0: there is no licence */
    uint64_t address, length; /* where `key` leads */
    struct soft_read_cache_versions versions;
};

#endif
