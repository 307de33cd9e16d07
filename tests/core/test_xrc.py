"""XRC: domains named by files, and sends that name a shared receive queue of such a domain.

The device's part is tested in C: tests/native/test_xrc*.c.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from aioverbs import QpType, SendFlags, SendOpcode, VerbsError
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from aioverbs.attributes import QpCapabilities
from tests.core.contexts import opened
from tests.core.pairs import ALL_ACCESS, CAPABILITIES, make_queue, succeed
from tests.core.transports import start_xrc_receiver, start_xrc_sender
from tests.raw_verbs import post_recv, post_send

SEND, SIGNALED = SendOpcode.SEND, SendFlags.SIGNALED


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    """A descriptor whose inode names a domain."""
    descriptor = os.open(tmp_path / "domain", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


@dataclass
class Sender:
    """A sending process: a queue pair without a receive queue."""

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
    """A receiving process: a shared receive queue with its own memory and completion queue."""

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
    """Create the far end of a sender, and connect both."""
    target = handles.QueuePair(xrc_domain=xrc_domain, qp_type=QpType.XRC_RECV)
    start_xrc_receiver(target, sender.qp.qp_num)
    start_xrc_sender(sender.qp, target.qp_num)
    return target


@pytest.mark.every_way
def test_one_connection_reaches_the_queues_of_all_processes_of_a_domain(context: software.Context, file: int) -> None:
    """The target belongs to one context, and the queues reached through it to several."""
    with opened("inline") as sending, opened("thread") as other:
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


def test_xrc_queue_pairs_lack_one_queue(inline: software.Context) -> None:
    sender = make_sender(inline)
    target = handles.QueuePair(xrc_domain=parent_domain.XrcDomain(inline), qp_type=QpType.XRC_RECV)
    assert sender.qp.capabilities.max_send_wr == 128
    assert sender.qp.capabilities.max_recv_wr == sender.qp.capabilities.max_recv_sge == 0
    assert target.capabilities == target.query().cap == QpCapabilities(0, 0, 0, 0, 0)
    with pytest.raises(VerbsError, match="ibv_post_recv failed: EINVAL"):
        post_recv(sender.qp)
    with pytest.raises(VerbsError, match="ibv_post_send failed: EINVAL"):
        post_send(target, SEND)


def test_domains_without_a_file(inline: software.Context) -> None:
    first, second = parent_domain.XrcDomain(inline), parent_domain.XrcDomain(inline)
    assert first.verbs_pointer != second.verbs_pointer
    with pytest.raises(VerbsError, match="ibv_open_xrcd failed: EINVAL"):
        parent_domain.XrcDomain(inline, -1, 0)


def test_a_domain_for_each_inode(inline: software.Context, file: int, tmp_path: Path) -> None:
    with pytest.raises(VerbsError, match="ibv_open_xrcd failed: EAGAIN"):
        parent_domain.XrcDomain(inline, file, 0)  # the domain does not exist yet
    first = parent_domain.XrcDomain(inline, file, os.O_CREAT | os.O_EXCL)
    with pytest.raises(VerbsError, match="ibv_open_xrcd failed: EINVAL"):
        parent_domain.XrcDomain(inline, file, os.O_CREAT | os.O_EXCL)
    os.link(tmp_path / "domain", tmp_path / "other name")
    again = os.open(tmp_path / "other name", os.O_RDONLY)
    second = parent_domain.XrcDomain(inline, again, 0)
    os.close(again)
    assert inline.counts()["xrc_domains"] == 2
    first.destroy()
    parent_domain.XrcDomain(inline, file, 0).destroy()  # the second handle keeps the domain
    second.destroy()
    with pytest.raises(VerbsError, match="ibv_open_xrcd failed: EAGAIN"):
        parent_domain.XrcDomain(inline, file, 0)
