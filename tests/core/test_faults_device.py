"""What happens to a device: its port goes down, objects break, it is lost."""

import errno
from collections.abc import Callable

import pytest

from aioverbs import (
    AccessFlags,
    ClosedResourceError,
    EventType,
    MwType,
    PortState,
    QpState,
    SendFlags,
    SendOpcode,
    VerbsError,
    WcStatus,
)
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from aioverbs.testing import destroy_all
from tests.core.allocators import Recording
from tests.core.contexts import children, opened
from tests.core.family import make_all
from tests.core.pairs import connect, make_domain, make_end, make_pair, next_event, succeed, wait_for
from tests.core.test_faults_messages import again, make_patient_pair, write
from tests.core.transports import way_to
from tests.raw_verbs import bind_window, poll, post_recv, post_send
from tests.waiting import wait_until

WRITE, SEND, SIGNALED = SendOpcode.RDMA_WRITE, SendOpcode.SEND, SendFlags.SIGNALED


def expect(context: software.Context, event_type: EventType, element: handles.Handle | None) -> None:
    """The next event, which is acknowledged."""
    event = next_event(context)
    assert (event.event_type, event.element) == (event_type, element)
    event.ack()


class TestPort:
    def test_down_and_up(self, context: software.Context, kind: str) -> None:
        near, far = make_pair(context, kind)
        assert context.query_port().state is PortState.ACTIVE
        context.faults.set_port(False)
        try:
            assert context.query_port().state is PortState.DOWN
            event = next_event(context)
            assert (event.event_type, event.port_num, event.element) == (EventType.PORT_ERR, 1, None)
            event.ack()
            post_send(near.qp, WRITE, wr_id=1)
            assert wait_for(near.cq)[0].status is WcStatus.RETRY_EXC_ERR
        finally:
            context.faults.set_port(True)
        assert context.query_port().state is PortState.ACTIVE
        event = next_event(context)
        assert (event.event_type, event.port_num, event.element) == (EventType.PORT_ACTIVE, 1, None)
        event.ack()
        again(near, far)
        write(near, far, 2)
        succeed(near.cq)

    def test_it_is_the_port_of_all_contexts(self, context: software.Context) -> None:
        with opened("inline") as other:
            other.faults.set_port(False)
            try:
                assert context.query_port().state is PortState.DOWN
            finally:
                context.faults.set_port(True)
            assert other.query_port().state is PortState.ACTIVE
            for each in (context, other):
                expect(each, EventType.PORT_ERR, None)
                expect(each, EventType.PORT_ACTIVE, None)
                assert each.get_async_event() is None

    def test_as_it_is_already(self, context: software.Context) -> None:
        context.faults.set_port(True)
        assert context.get_async_event() is None

    def test_requests_go_on_when_it_comes_back(self, context: software.Context) -> None:
        near, far = make_patient_pair(context, timeout=17)  # half a second for each attempt
        near.memory[:4] = b"late"
        context.faults.set_port(False)
        try:
            write(near, far, 1, 4)
            assert poll(near.cq) == []
        finally:
            context.faults.set_port(True)
        succeed(near.cq)
        assert far.memory[:4] == b"late"
        for event in iter(context.get_async_event, None):
            event.ack()


class TestBreaking:
    def test_a_queue_pair(self, context: software.Context, kind: str) -> None:
        near, far = make_pair(context, kind)
        post_recv(far.qp, wr_id=5)
        context.faults.break_queue_pair(far.qp)
        expect(context, EventType.QP_FATAL, far.qp)
        (flushed,) = wait_for(far.cq)
        assert (flushed.wr_id, flushed.status) == (5, WcStatus.WR_FLUSH_ERR)
        assert far.qp.query().qp_state is QpState.ERR
        post_send(near.qp, WRITE)
        assert wait_for(near.cq)[0].status is WcStatus.RETRY_EXC_ERR
        assert context.get_async_event() is None

    def test_a_completion_queue(self, context: software.Context, kind: str) -> None:
        near, far = make_pair(context, kind)
        write(near, far, 1)
        wait_until(lambda: near.qp.query().sq_psn == 1)
        context.faults.break_completion_queue(near.cq)
        context.faults.break_completion_queue(near.cq)
        expect(context, EventType.CQ_ERR, near.cq)
        assert context.get_async_event() is None  # it breaks once
        succeed(near.cq)
        with pytest.raises(VerbsError, match="failed: EIO"):
            poll(near.cq)
        write(near, far, 2)
        expect(context, EventType.QP_FATAL, near.qp)

    def test_a_shared_receive_queue(self, context: software.Context, kind: str) -> None:
        domain = make_domain(context, kind)
        srq = handles.SharedReceiveQueue(domain, 4)
        near, far = make_end(domain), make_end(domain, srq=srq)
        connect(near.qp, far.qp)
        post_recv(srq, [far.sge(0, 8)])
        context.faults.break_shared_receive_queue(srq)
        expect(context, EventType.SRQ_ERR, srq)
        post_send(near.qp, SEND, [near.sge(0, 8)])
        assert wait_for(near.cq)[0].status is WcStatus.RNR_RETRY_EXC_ERR
        assert poll(far.cq) == []

    def test_objects_of_others_and_closed_ones(self, context: software.Context) -> None:
        domain = make_domain(context, "plain")
        end, srq = make_end(domain), handles.SharedReceiveQueue(domain, 4)
        plan = context.faults
        breaking: list[tuple[Callable[..., None], handles.Handle]] = [
            (plan.break_queue_pair, end.qp),
            (plan.break_completion_queue, end.cq),
            (plan.break_shared_receive_queue, srq),
        ]
        with opened("inline") as other:
            for call, handle in breaking:
                with pytest.raises(ValueError, match="is not of <Context of soft0>"):
                    getattr(other.faults, call.__name__)(handle)
                for wrong in (None, context):
                    with pytest.raises(TypeError):
                        call(wrong)
            assert context.get_async_event() is None
        for call, handle in breaking:
            handle.destroy()
            with pytest.raises(ClosedResourceError):
                call(handle)


class TestLosingTheDevice:
    def test_verbs_answer_eio(self, context: software.Context) -> None:
        allocator = Recording()
        pd = handles.ProtectionDomain(context)
        td = parent_domain.ThreadDomain(context)
        domain = parent_domain.ParentDomain(pd, td, allocator)
        near, far = make_end(domain), make_end(domain, extended=True)
        connect(near.qp, far.qp)
        channel = handles.CompletionChannel(context)
        cq = handles.CompletionQueue(context, 4, channel)
        xrc_domain = parent_domain.XrcDomain(context)
        srq = handles.SharedReceiveQueue(pd, 4, xrc_domain=xrc_domain, cq=cq)
        window = handles.MemoryWindow(pd, MwType.TYPE_1)
        write(near, far, 7)
        wait_until(lambda: near.qp.query().sq_psn == 1)
        opened, counts, held = children(context), context.counts(), len(allocator.live)
        way = way_to(context)
        share = handles.ProtectionDomain(context)
        number = software.share(share, 1)
        share.destroy()

        context.faults.lose_device()
        expect(context, EventType.DEVICE_FATAL, None)
        calls: dict[str, Callable[[], object]] = {
            "ibv_query_device": context.query_device,
            "ibv_query_port": context.query_port,
            "ibv_query_gid": context.query_gid,
            "ibv_query_pkey": context.query_pkey,
            "ibv_alloc_pd": lambda: handles.ProtectionDomain(context),
            "ibv_alloc_td": lambda: parent_domain.ThreadDomain(context),
            "ibv_alloc_parent_domain": lambda: parent_domain.ParentDomain(pd, td, allocator),
            "ibv_alloc_shpd": lambda: software.share(pd, 1),
            "ibv_share_pd": lambda: software.open_shared(context, number, 1),
            "ibv_open_xrcd": lambda: parent_domain.XrcDomain(context),
            "ibv_reg_mr": lambda: handles.MemoryRegion(pd, bytearray(8)),
            "ibv_alloc_mw": lambda: handles.MemoryWindow(pd, MwType.TYPE_2),
            "ibv_bind_mw": lambda: bind_window(near.qp, window, near.region, 0, 8, AccessFlags.REMOTE_READ),
            "ibv_create_comp_channel": lambda: handles.CompletionChannel(context),
            "ibv_create_cq": lambda: handles.CompletionQueue(context, 4),
            "ibv_create_cq_ex": lambda: handles.CompletionQueue(context, 4, parent_domain=domain),
            "ibv_resize_cq": lambda: cq.resize(8),
            "ibv_modify_cq": lambda: cq.modify(1, 1),
            "ibv_req_notify_cq": cq.request_notify,
            "ibv_create_srq": lambda: handles.SharedReceiveQueue(domain, 4),
            "ibv_create_srq_ex": lambda: handles.SharedReceiveQueue(domain, 4, xrc_domain=xrc_domain, cq=cq),
            "ibv_modify_srq": lambda: srq.modify(limit=1),
            "ibv_query_srq": srq.query,
            "ibv_get_srq_num": lambda: srq.number,
            "ibv_post_srq_recv": lambda: post_recv(srq),
            "ibv_create_qp": lambda: handles.QueuePair(domain, near.cq, near.cq),
            "ibv_create_qp_ex": lambda: handles.QueuePair(xrc_domain=xrc_domain, qp_type=10),
            "ibv_query_qp": near.qp.query,
            "ibv_modify_qp": lambda: near.qp.modify(QpState.ERR),
            "ibv_post_send": lambda: post_send(near.qp, WRITE),
            "ibv_post_recv": lambda: post_recv(near.qp),
            "ibv_create_ah": lambda: handles.AddressHandle(pd, way),
        }
        for verb, call in calls.items():
            with pytest.raises(VerbsError, match=f"^{verb} failed: EIO") as caught:
                call()
            assert caught.value.errno == errno.EIO
            assert caught.value.__cause__ is None
        assert children(context) == opened
        assert context.counts() == counts
        assert len(allocator.live) == held
        # What had come before is still to be taken; nothing more comes.
        succeed(near.cq)
        assert poll(near.cq) == poll(far.cq) == []
        assert channel.get_event() is None
        assert context.get_async_event() is None
        destroy_all(opened)
        assert not any(context.counts().values())
        assert allocator.live == []

    def test_one_of_everything_goes(self, context: software.Context) -> None:
        family = make_all(context)
        context.faults.lose_device()
        expect(context, EventType.DEVICE_FATAL, None)
        for handle in reversed(list(family.values())):
            handle.destroy()
        assert not [handle for handle in family.values() if not handle.closed]

    def test_what_was_under_way_stays_so(self, context: software.Context) -> None:
        near, far = make_patient_pair(context, timeout=17)
        context.faults.lose_messages_at_random(1_000_000)
        write(near, far, 1)
        context.faults.hold(far.qp)
        context.faults.lose_device()
        context.faults.lose_device()
        expect(context, EventType.DEVICE_FATAL, None)
        context.faults.clear()
        assert poll(near.cq) == poll(far.cq) == []
        assert context.faults.held() == 0

    def test_it_is_lost_for_one_context(self, context: software.Context) -> None:
        with opened("engine") as other:
            near, far = make_end(make_domain(context, "plain")), make_end(make_domain(other, "plain"))
            connect(near.qp, far.qp)
            write(near, far, 1)
            succeed(near.cq)
            other.faults.lose_device()
            expect(other, EventType.DEVICE_FATAL, None)
            write(near, far, 2)
            assert wait_for(near.cq)[0].status is WcStatus.RETRY_EXC_ERR  # its peer is silent
            assert context.get_async_event() is None
            context.query_device()
