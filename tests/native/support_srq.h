/* Shared receive queues, and a device half to take from them by hand. */
#ifndef AIOVERBS_TESTS_SUPPORT_SRQ_H
#define AIOVERBS_TESTS_SUPPORT_SRQ_H

#include "soft/objects/srq.h"
#include "support_home.h"

/* The verb's answer. */
struct ibv_srq *try_srq(const struct home *home, uint32_t max_wr, uint32_t max_sge);

/* A basic queue for requests of up to 4 entries; a REQUIRE where there is none. */
struct ibv_srq *make_srq(const struct home *home, uint32_t max_wr);

/* An XRC queue for requests of up to 4 entries; the verb's answer. */
struct ibv_srq *try_xrc_srq(const struct home *home, struct ibv_xrcd *xrcd, struct ibv_cq *cq, uint32_t max_wr);

/* A domain without an inode; a REQUIRE where there is none. */
struct ibv_xrcd *make_xrcd(struct ibv_context *context);

/* One receive without memory; the verb's answer. */
int srq_post(struct ibv_srq *srq, uint64_t wr_id);

/* As queue pairs take: false where nothing is there. With `give_back`, as if its completion had been polled, too. */
bool srq_take(struct ibv_srq *srq, struct soft_receive *receive, bool give_back);

/* Takes and gives back, and checks that it is this one. */
void srq_expect(struct ibv_srq *srq, uint64_t wr_id);

/* modify_srq's answer. */
int srq_arm(struct ibv_srq *srq, uint32_t limit);
int srq_resize(struct ibv_srq *srq, uint32_t max_wr);

struct ibv_srq_attr srq_query(struct ibv_srq *srq);

#endif
