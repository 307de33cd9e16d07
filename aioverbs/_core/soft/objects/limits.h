/* Limits of the device. */
#ifndef AIOVERBS_SOFT_OBJECTS_LIMITS_H
#define AIOVERBS_SOFT_OBJECTS_LIMITS_H

#include "soft/base/id_table.h"

#define SOFT_MAX_SGE 32u
#define SOFT_MAX_INLINE 1024u
#define SOFT_MAX_QP_WR 32768u
#define SOFT_MAX_SRQ_WR 32768u
#define SOFT_MAX_CQE (1u << 22)
#define SOFT_MAX_RD_ATOMIC 16u
#define SOFT_MAX_MESSAGE (1u << 30)
#define SOFT_MTU 4096u /* MTU of the port, in bytes */
#define SOFT_GRH 40u   /* bytes of the GRH before a datagram */

#define SOFT_FIRST_QPN 0x10u /* 0 and 1 are the management queue pairs of the architecture */
#define SOFT_FIRST_MR 1u
#define SOFT_FIRST_SRQ 1u
#define SOFT_MAX_NUMBER (SOFT_CHUNKS * SOFT_CHUNK_SIZE)

#endif
