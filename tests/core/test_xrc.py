"""XRC: domains that files name, and sends that name a shared receive queue of such a domain."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from aioverbs import BusyResourceError, QpState, QpType, SendFlags, SendOpcode, VerbsError, WcStatus
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from aioverbs.attributes import QpCapabilities
from tests.core.contexts import opened
from tests.core.pairs import ALL_ACCESS, CAPABILITIES, make_queue, succeed, wait_for
from tests.core.transports import start_xrc_receiver, start_xrc_sender
from tests.raw_verbs import poll, post_recv, post_send

SEND, SIGNALED = SendOpcode.SEND, SendFlags.SIGNALED


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A descriptor whose inode names a domain."""
    descriptor = os.open(tmp_path / "domain", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


@dataclass
class Sender:
    """A process that sends: a queue pair without a receive queue."""

    qp: handles.QueuePair
    cq: handles.CompletionQueue
    memory: bytearray
    region: handles.MemoryRegion

    def send(self, srq: handles.SharedReceiveQueue, data: bytes) -> None:
        self.memory[: len(data)] = data
        post_send(
            self.qp,
            SEND,
            [(self.region.address, len(data), self.region.lkey)],
            remote_srqn=srq.number,
            flags=SIGNALED,
        )


def make_sender(context: software.Context) -> Sender:
    pd = handles.ProtectionDomain(context)
    cq = make_queue(context, pd)
    memory = bytearray(64)
    qp = handles.QueuePair(pd, cq, capabilities=CAPABILITIES, qp_type=QpType.XRC_SEND)
    return Sender(qp, cq, memory, handles.MemoryRegion(pd, memory, ALL_ACCESS))


@dataclass
class Receiver:
    """A process that receives: a shared receive queue with its own memory and completions."""

    srq: handles.SharedReceiveQueue
    cq: handles.CompletionQueue
    memory: bytearray
    region: handles.MemoryRegion

    def post(self) -> None:
        post_recv(self.srq, [(self.region.address, 64, self.region.lkey)], wr_id=9)


def make_receiver(context: software.Context, xrc_domain: parent_domain.XrcDomain) -> Receiver:
    pd = handles.ProtectionDomain(context)
    cq = make_queue(context, pd)
    memory = bytearray(64)
    srq = handles.SharedReceiveQueue(pd, 16, xrc_domain=xrc_domain, cq=cq)
    return Receiver(srq, cq, memory, handles.MemoryRegion(pd, memory, ALL_ACCESS))


def make_target(xrc_domain: parent_domain.XrcDomain, sender: Sender) -> handles.QueuePair:
    """The far end of a sender, connected with it."""
    target = handles.QueuePair(xrc_domain=xrc_domain, qp_type=QpType.XRC_RECV)
    start_xrc_receiver(target, sender.qp.qp_num)
    start_xrc_sender(sender.qp, target.qp_num)
    return target


def test_one_connection_reaches_the_queues_of_all_processes_of_a_domain(context: software.Context, file: int) -> None:
    """The point of XRC: the target belongs to one context, the queues that are reached through it to several."""
    with opened("inline") as sending, opened("engine") as other:
        here, there = parent_domain.XrcDomain(context, file), parent_domain.XrcDomain(other, file)
        receivers = make_receiver(context, here), make_receiver(other, there)
        sender = make_sender(sending)
        target = make_target(here, sender)
        for number, receiver in enumerate(receivers):
            receiver.post()
            sender.send(receiver.srq, b"number %d" % number)
            succeed(sender.cq)
            completion = succeed(receiver.cq)
            assert (completion.wr_id, completion.byte_len) == (9, 8)
            assert completion.src_qp == sender.qp.qp_num
            assert completion.qp_num == target.qp_num
            assert receiver.memory[:9] == b"number %d\0" % number
        assert [target.pd, target.send_cq, target.recv_cq, target.srq] == [None] * 4
        assert target.xrc_domain is here
        assert sender.qp.recv_cq is None
        target.destroy()


def test_queues_of_another_domain_are_not_reached(context: software.Context) -> None:
    mine, other = parent_domain.XrcDomain(context), parent_domain.XrcDomain(context)
    receiver, sender = make_receiver(context, other), make_sender(context)
    target = make_target(mine, sender)
    receiver.post()
    sender.send(receiver.srq, b"no")
    assert wait_for(sender.cq)[0].status is not WcStatus.SUCCESS
    assert poll(receiver.cq) == []
    assert receiver.memory == bytes(64)
    target.destroy()


def test_one_sided_requests_go_by_the_target_s_memory(context: software.Context) -> None:
    xrc_domain = parent_domain.XrcDomain(context)
    receiver, sender = make_receiver(context, xrc_domain), make_sender(context)
    make_target(xrc_domain, sender)
    sender.memory[:5] = b"write"
    post_send(
        sender.qp,
        SendOpcode.RDMA_WRITE,
        [(sender.region.address, 5, sender.region.lkey)],
        remote_srqn=receiver.srq.number,
        remote_addr=receiver.region.address,
        rkey=receiver.region.rkey,
        flags=SIGNALED,
    )
    succeed(sender.cq)
    assert receiver.memory[:6] == b"write\0"


def test_numbers_are_distinct(context: software.Context) -> None:
    xrc_domain = parent_domain.XrcDomain(context)
    receivers = [make_receiver(context, xrc_domain) for _ in range(4)]
    assert len({receiver.srq.number for receiver in receivers}) == 4
    assert all(0 < receiver.srq.number < 1 << 24 for receiver in receivers)


def test_depths_that_it_has_not(inline: software.Context) -> None:
    sender = make_sender(inline)
    target = handles.QueuePair(xrc_domain=parent_domain.XrcDomain(inline), qp_type=QpType.XRC_RECV)
    assert sender.qp.capabilities.max_send_wr == 128
    assert sender.qp.capabilities.max_recv_wr == sender.qp.capabilities.max_recv_sge == 0
    assert target.capabilities == target.query().cap == QpCapabilities(0, 0, 0, 0, 0)
    with pytest.raises(VerbsError, match="ibv_post_recv failed: EINVAL"):
        post_recv(sender.qp)
    with pytest.raises(VerbsError, match="ibv_post_send failed: EINVAL"):
        post_send(target, SEND)


class TestDomains:
    """``ibv_open_xrcd`` and ``ibv_close_xrcd``."""

    def test_without_a_file(self, inline: software.Context) -> None:
        first, second = parent_domain.XrcDomain(inline), parent_domain.XrcDomain(inline)
        assert first.address != second.address
        with pytest.raises(VerbsError, match="ibv_open_xrcd failed: EINVAL"):
            parent_domain.XrcDomain(inline, -1, 0)

    def test_a_domain_for_each_inode(self, inline: software.Context, file: int, tmp_path: Path) -> None:
        with pytest.raises(VerbsError, match="ibv_open_xrcd failed: EAGAIN"):
            parent_domain.XrcDomain(inline, file, 0)  # there is none yet
        with pytest.raises(VerbsError, match="ibv_open_xrcd failed: EBADF"):
            parent_domain.XrcDomain(inline, 1 << 20)
        first = parent_domain.XrcDomain(inline, file, os.O_CREAT | os.O_EXCL)
        with pytest.raises(VerbsError, match="ibv_open_xrcd failed: EINVAL"):
            parent_domain.XrcDomain(inline, file, os.O_CREAT | os.O_EXCL)
        os.link(tmp_path / "domain", tmp_path / "other name")
        again = os.open(tmp_path / "other name", os.O_RDONLY)
        second = parent_domain.XrcDomain(inline, again, 0)
        os.close(again)
        assert inline.counts()["xrc_domains"] == 2
        first.destroy()
        parent_domain.XrcDomain(inline, file, 0).destroy()  # the second one keeps it
        second.destroy()
        with pytest.raises(VerbsError, match="ibv_open_xrcd failed: EAGAIN"):
            parent_domain.XrcDomain(inline, file, 0)

    def test_it_stays_while_something_is_associated(self, context: software.Context, file: int) -> None:
        xrc_domain = parent_domain.XrcDomain(context, file)
        target = handles.QueuePair(xrc_domain=xrc_domain, qp_type=QpType.XRC_RECV)
        receiver = make_receiver(context, xrc_domain)
        for handle in (target, receiver.srq):
            with pytest.raises(BusyResourceError, match="open objects"):
                xrc_domain.destroy()
            handle.destroy()
        xrc_domain.destroy()
        assert context.counts()["xrc_domains"] == 0


def test_state_table_of_the_two_ends(inline: software.Context) -> None:
    sender = make_sender(inline)
    target = make_target(parent_domain.XrcDomain(inline), sender)
    assert target.query().qp_state is QpState.RTR
    assert sender.qp.query().qp_state is QpState.RTS
    with pytest.raises(VerbsError, match="ibv_modify_qp failed: EINVAL"):
        sender.qp.modify(min_rnr_timer=3)  # it has nothing to receive
    target.modify(QpState.RTS, sq_psn=0, timeout=3)
    target.modify(min_rnr_timer=3)
