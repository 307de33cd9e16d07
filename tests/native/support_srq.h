/* Helpers for shared receive queues; a device half that takes receives by hand. */
#ifndef AIOVERBS_TESTS_SUPPORT_SRQ_H
#define AIOVERBS_TESTS_SUPPORT_SRQ_H

#include "soft/objects/srq.h"
#include "support_home.h"

/* Return the verb's result. */
struct ibv_srq *try_srq(const struct home *home, uint32_t max_wr, uint32_t max_sge);

/* Create a basic queue for requests of up to 4 entries. REQUIRE that it works. */
struct ibv_srq *make_srq(const struct home *home, uint32_t max_wr);

/* Create an XRC queue for requests of up to 4 entries. Return the verb's result. */
struct ibv_srq *try_xrc_srq(const struct home *home, struct ibv_xrcd *xrcd, struct ibv_cq *cq, uint32_t max_wr);

/* Open a domain without an inode. REQUIRE that it works. */
struct ibv_xrcd *make_xrcd(struct ibv_context *context);

/* Post one receive without memory. Return the verb's result. */
int srq_post(struct ibv_srq *srq, uint64_t wr_id);

/* Take a receive, as queue pairs do. Return false if there is none. With `give_back`, also return its credit, as if its
 * completion had been polled. */
bool srq_take(struct ibv_srq *srq, struct soft_receive *receive, bool give_back);

/* Take a receive and return its credit; check that it is this one. */
void srq_expect(struct ibv_srq *srq, uint64_t wr_id);

/* Return the result of modify_srq. */
int srq_arm(struct ibv_srq *srq, uint32_t limit);
int srq_resize(struct ibv_srq *srq, uint32_t max_wr);

struct ibv_srq_attr srq_query(struct ibv_srq *srq);

#endif
