/* Delivery to peers of this device: find the peer of a queue pair, and execute a request there. */
#include "soft/transport/loopback.h"

#include "soft/base/id_table.h"
#include "soft/base/lock_order.h"
#include "soft/objects/context.h"
#include "soft/objects/device.h"
#include "soft/objects/psn_window.h"
#include "soft/objects/qp.h"
#include "soft/transport/request.h"
#include "soft/transport/responder.h"

bool soft_can_receive(const struct soft_qp *peer)
{
    unsigned int state = atomic_load(&peer->state);

    return soft_port_works(peer) &&
           (state == IBV_QPS_RTR || state == IBV_QPS_RTS || state == IBV_QPS_SQD || state == IBV_QPS_SQE);
}

/* Return whether a datagram has the right Q_Key. A work request whose Q_Key has the highest bit set uses that of its
 * queue pair instead. */
static bool accepts_datagram(const struct soft_qp *peer, const struct soft_request *request)
{
    uint32_t qkey = request->wqe->rkey;

    if (qkey & 0x80000000u)
        qkey = request->from->attr.qkey;
    return peer->qp.qp_type == IBV_QPT_UD && peer->attr.qkey == qkey;
}

/* Return whether the peer is connected to the sender, and the request is in sequence. Other packets are dropped. An
 * unreliable connection adopts the sequence number of each message. */
static bool accepts_connected(const struct soft_qp *peer, const struct soft_request *request)
{
    enum ibv_qp_type from = request->from->qp.qp_type;

    return peer->qp.qp_type == (from == IBV_QPT_XRC_SEND ? IBV_QPT_XRC_RECV : from) &&
           peer->attr.dest_qp_num == request->from->qp.qp_num && peer->is_loopback &&
           (peer->expected_psn == request->psn || from == IBV_QPT_UC);
}

void soft_loopback_deliver(const struct soft_request *request, struct soft_reply *reply)
{
    struct soft_qp *from = request->from, *peer;
    bool datagram = from->qp.qp_type == IBV_QPT_UD;

    peer = soft_table_find(&from->context->device->qps,
                           datagram ? (uint32_t)request->wqe->remote_addr : from->attr.dest_qp_num);
    if (!peer)
        return;
    soft_lock_take(&peer->rq_lock);
    if (soft_can_receive(peer) && (datagram ? accepts_datagram(peer, request) : accepts_connected(peer, request))) {
        soft_respond(peer, request, reply);
        if (reply->kind == SOFT_ACK)
            peer->expected_psn = (request->psn + request->packets) & SOFT_PSN_MASK;
    }
    soft_lock_give(&peer->rq_lock);
}
