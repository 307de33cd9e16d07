"""Scenarios of the seam's tests for any device: the same handles, hence the same compiled functions."""

import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aioverbs import AccessFlags, Mtu, QpState, WcStatus
from aioverbs._core.handles import handles
from aioverbs._providers import hardware, software
from aioverbs.attributes import AddressVector, QpCapabilities
from tests.raw_verbs import Completion, poll

GID_INDEX = 1  # an IPv4 GID, RoCE v2, on kernel soft-RoCE and on the software device
ALL_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC


def rdma_devices() -> list[str]:
    """Return the RDMA devices to test: those in AIOVERBS_DEVICE or AIOVERBS_RDMA_DEVICES, else all of the machine."""
    named = os.environ.get("AIOVERBS_DEVICE") or os.environ.get("AIOVERBS_RDMA_DEVICES")
    return named.split(",") if named else hardware.names()


def open_context(name: str) -> handles.Context:
    """Open a device of any provider by name."""
    return software.open_context(name) if software.is_software(name) else hardware.open_context(name)


@contextmanager
def opened(name: str) -> Iterator[handles.Context]:
    """Open a device; at the end of the block, destroy everything created on it, newest first."""
    context = open_context(name)
    try:
        yield context
    finally:
        for handle in reversed(handles.open_handles()):
            if handle.context is context:
                handle.destroy()


class Pair:
    """Two connected queue pairs, each with a completion queue on a channel and a region of its own."""

    def __init__(
        self,
        near: handles.ProtectionDomain,
        far: handles.ProtectionDomain,
        *,
        size: int = 65536,
        extended: bool = False,
        parent_domain_queues: bool = False,
    ) -> None:
        self.memory = [bytearray(size), bytearray(size)]
        self.regions: list[handles.MemoryRegion] = []
        self.channels: list[handles.CompletionChannel] = []
        self.queues: list[handles.CompletionQueue] = []
        self.qps: list[handles.QueuePair] = []
        for pd, memory in zip((near, far), self.memory, strict=True):
            channel = handles.CompletionChannel(pd.context)
            cq = handles.CompletionQueue(
                pd.context, 64, channel, extended=extended, parent_domain=pd if parent_domain_queues else None
            )
            self.regions.append(handles.MemoryRegion(pd, memory, ALL_ACCESS))
            self.channels.append(channel)
            self.queues.append(cq)
            self.qps.append(handles.QueuePair(pd, cq, cq, QpCapabilities(max_send_sge=2, max_recv_sge=2)))
        connect(self.qps[0], self.qps[1])
        connect(self.qps[1], self.qps[0])

    def sge(self, side: int, offset: int, length: int) -> tuple[int, int, int]:
        """Return a scatter/gather entry of one side's region."""
        region = self.regions[side]
        return region.address + offset, length, region.lkey

    def wait(self, side: int) -> Completion:
        """Poll for the next completion of one side."""
        deadline = time.monotonic() + 20
        while not (found := poll(self.queues[side], 1)):
            if time.monotonic() > deadline:
                raise TimeoutError("no completion arrived")
        return found[0]

    def succeed(self, side: int) -> Completion:
        """Poll for the next completion of one side, and check that it succeeded."""
        completion = self.wait(side)
        assert completion.status is WcStatus.SUCCESS
        return completion

    def sleep(self, side: int) -> None:
        """Sleep until a completion event of one side arrives, and acknowledge it."""
        readable, _, _ = select.select([self.channels[side]], [], [], 20)
        assert readable, "no event arrived"
        queue = self.channels[side].get_event()
        assert queue is self.queues[side]
        queue.ack_events()

    def destroy(self) -> None:
        """Destroy all objects, children first."""
        for handle in (*self.qps, *self.queues, *self.channels, *self.regions):
            handle.destroy()


def connect(qp: handles.QueuePair, peer: handles.QueuePair, max_rd_atomic: int = 1) -> None:
    """Move a queue pair to RTS, connected to a peer."""
    mtu = qp.context.query_port(1).active_mtu
    qp.modify(QpState.INIT, pkey_index=0, port_num=1, qp_access_flags=ALL_ACCESS)
    qp.modify(
        QpState.RTR,
        path_mtu=min(mtu, peer.context.query_port(1).active_mtu, Mtu.MTU_4096),
        dest_qp_num=peer.qp_num,
        rq_psn=0,
        max_dest_rd_atomic=1,
        min_rnr_timer=12,
        av=AddressVector(dgid=peer.context.query_gid(1, GID_INDEX), sgid_index=GID_INDEX),
    )
    qp.modify(QpState.RTS, timeout=14, retry_cnt=6, rnr_retry=6, sq_psn=0, max_rd_atomic=max_rd_atomic)


def to_itself(qp: handles.QueuePair) -> None:
    """Move a UC queue pair to RTS, connected to itself."""
    qp.modify(QpState.INIT, pkey_index=0, port_num=1, qp_access_flags=ALL_ACCESS)
    qp.modify(
        QpState.RTR,
        path_mtu=min(qp.context.query_port(1).active_mtu, Mtu.MTU_4096),
        dest_qp_num=qp.qp_num,
        rq_psn=0,
        av=AddressVector(dgid=qp.context.query_gid(1, GID_INDEX), sgid_index=GID_INDEX),
    )
    qp.modify(QpState.RTS, sq_psn=0)
