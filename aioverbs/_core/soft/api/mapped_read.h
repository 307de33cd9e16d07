/* Reads of a peer's memory that is mapped here. */
#ifndef AIOVERBS_SOFT_API_MAPPED_READ_H
#define AIOVERBS_SOFT_API_MAPPED_READ_H

#include <stdbool.h>
#include <stdint.h>

#include "abi/libibverbs.h"

/* Read memory of the peer by a key, if it is mapped here and the key still holds: see soft/fabric/read_cache.h. This is
 * no request: it has no place among those of the queue pair, and no completion. Return false if a request has to be
 * posted; `to` may have any content then. */
bool soft_read_mapped(struct ibv_qp *qp, void *to, uint64_t address, uint32_t key, uint32_t length);

#endif
