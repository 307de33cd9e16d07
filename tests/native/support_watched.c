#include "support.h"
#include "support_watched.h"

#include <fcntl.h>

void open_watched(struct watched *watched, bool blocking)
{
    memset(watched, 0, sizeof(*watched));
    home_open(&watched->home);
    watched->channel = soft_verbs.create_comp_channel(watched->home.context);
    REQUIRE(watched->channel != NULL);
    CHECK(watched->channel->context == watched->home.context);
    if (!blocking)
        REQUIRE_EQ(fcntl(watched->channel->fd, F_SETFL, O_NONBLOCK), 0);
    watched->cq = home_cq(&watched->home, 32, watched->channel);
    CHECK(watched->cq->channel == watched->channel);
    watched->silent = home_cq(&watched->home, 32, NULL);
    watched->sender = make_qp(watched->home.pd, watched->silent, 16);
    watched->receiver = make_qp(watched->home.pd, watched->cq, 16);
    qp_connect(watched->sender, &default_link, watched->receiver->qp_num);
    qp_connect(watched->receiver, &default_link, watched->sender->qp_num);
}

void close_watched(struct watched *watched)
{
    CHECK_EQ(soft_verbs.destroy_qp(watched->sender), 0);
    CHECK_EQ(soft_verbs.destroy_qp(watched->receiver), 0);
    CHECK_EQ(soft_verbs.destroy_cq(watched->cq), 0);
    CHECK_EQ(soft_verbs.destroy_cq(watched->silent), 0);
    CHECK_EQ(soft_verbs.destroy_comp_channel(watched->channel), 0);
    home_close(&watched->home);
}

void deliver(struct watched *watched, bool solicited)
{
    struct ibv_send_wr wr = request(IBV_WR_SEND, 1, NULL, 0);
    struct ibv_recv_wr recv = {.wr_id = 2}, *bad;

    wr.send_flags |= solicited ? IBV_SEND_SOLICITED : 0;
    CHECK_EQ(verbs_post_recv(watched->receiver, &recv, &bad), 0);
    CHECK_EQ(post(watched->sender, &wr), 0);
    EXPECT(watched->silent, 1, IBV_WC_SUCCESS); /* the sender's completion comes after the receiver's */
}

int take_event(struct watched *watched)
{
    struct ibv_cq *cq = NULL;
    void *context;
    int answer = soft_verbs.get_cq_event(watched->channel, &cq, &context);

    if (!answer) {
        CHECK(cq == watched->cq && context == watched->cq->cq_context);
        soft_verbs.ack_cq_events(cq, 1);
    }
    return answer;
}

void check_no_event(struct watched *watched)
{
    CHECK(!is_readable(watched->channel->fd));
    errno = 0;
    CHECK_EQ(take_event(watched), -1);
    CHECK_EQ(errno, EAGAIN);
}
