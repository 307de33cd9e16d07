"""Two connected queue pairs of any type, with registered memory on both sides."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aioverbs import (
    AccessFlags,
    CompletionQueue,
    Device,
    MemoryRegion,
    MessageModel,
    QpCapabilities,
    QpType,
    QueuePair,
    RegionSlice,
    ResourceDomain,
    SharedReceiveQueue,
    ThreadModel,
)
from aioverbs._core.data_path.data_path import Operation, Received
from tests.devices import remote_device
from tests.waiting import until

ACCESS = (
    AccessFlags.LOCAL_WRITE
    | AccessFlags.REMOTE_WRITE
    | AccessFlags.REMOTE_READ
    | AccessFlags.REMOTE_ATOMIC
    | AccessFlags.MW_BIND
)
PEERS = ACCESS & ~AccessFlags.MW_BIND
CAPABILITIES = QpCapabilities(max_send_sge=4, max_recv_sge=4)
CONNECTED = [QpType.RC, QpType.UC, QpType.XRC_SEND]
TYPES = [*CONNECTED, QpType.UD]
UNRELIABLE = [QpType.UC, QpType.UD]
# Retransmit an unanswered request after 1.07 s instead of 67 ms, so that a test may hold the other side still for long.
LONG_TIMEOUT: dict[str, Any] = {"timeout": 18}


@dataclass
class Ends:
    """A near queue pair that posts requests and a far one that answers them.

    Both complete in one completion queue, unless far belongs to another device.
    """

    device: Device
    domain: ResourceDomain
    cq: CompletionQueue
    near: QueuePair
    far: QueuePair
    source: MemoryRegion
    target: MemoryRegion
    srq: SharedReceiveQueue | None
    remote_domain: ResourceDomain
    remote_cq: CompletionQueue
    addressing: dict[str, Any] = field(default_factory=dict)  # arguments that address a request to far

    @property
    def receives(self) -> QueuePair | SharedReceiveQueue:
        """The queue that receives messages sent to far."""
        return self.srq if self.srq is not None else self.far

    def receive(self, local: RegionSlice | None = None) -> Operation[Received]:
        return self.receives.receive(local if local is not None else self.target[:64])

    def write(self, data: bytes, offset: int = 0) -> Operation[None]:
        self.source.buffer[offset : offset + len(data)] = data
        part = slice(offset, offset + len(data))
        return self.near.write(self.source[part], self.target.remote()[part], **self.addressing)

    def connect(self, **attributes: Any) -> None:
        if self.near.qp_type is QpType.UD:
            self.near.activate()
            self.far.activate()
        else:
            here, there = self.near.local_endpoint(), self.far.local_endpoint()
            if self.near.qp_type is not QpType.UC and remote_device(self.device) is not self.device:
                attributes = {**LONG_TIMEOUT, **attributes}
            self.near.connect(there, PEERS, **attributes)
            self.far.connect(here, PEERS)

    async def wait_far_receives(self) -> None:
        """Wait until far has completed all of its receives, which takes longer when far is of another device."""
        await until(lambda: not self.far.statistics().receives.in_flight)

    async def wait_arrival(self, data: bytes, offset: int = 0) -> None:
        """Wait until `data` is in the target: an unreliable write completes before its data arrives."""
        await until(lambda: self.target.buffer[offset : offset + len(data)] == data)

    def is_idle(self) -> bool:
        """Return whether no request is in flight and no memory is pinned."""
        queues = {self.cq, self.remote_cq}
        in_flight = sum(queue.statistics().in_flight for queue in queues)
        return in_flight == len(self.source.pins) == len(self.target.pins) == 0


@asynccontextmanager
async def established_link(domain: ResourceDomain, remote_domain: ResourceDomain) -> AsyncIterator[None]:
    """Keep a link between two devices established, by a connected pair of queue pairs.

    Unreliable queue pairs do not wait long for the link to another device: what they send first may be lost. Reliable
    queue pairs wait, and later traffic uses the same link.
    """
    async with (
        domain.completion_queue(256) as cq,
        remote_domain.completion_queue(256) as remote_cq,
        domain.queue_pair(cq) as near,
        remote_domain.queue_pair(remote_cq) as far,
    ):
        for one, other in ((near, far), (far, near)):
            one.connect(other.local_endpoint(), **LONG_TIMEOUT)
        for one, other in ((near, far), (far, near)):
            receive = other.receive(None)
            await one.send(None)
            await receive
        yield


@asynccontextmanager
async def ends(
    device: Device,
    qp_type: QpType = QpType.RC,
    thread_model: ThreadModel = ThreadModel.SINGLE,
    message_model: MessageModel = MessageModel.DEFAULT,
    capabilities: QpCapabilities = CAPABILITIES,
    spin_ns: int | None = None,
    **attributes: Any,
) -> AsyncIterator[Ends]:
    async with AsyncExitStack() as stack:
        opened = stack.enter_async_context
        domain = await opened(device.resource_domain(thread_model=thread_model, message_model=message_model))
        source = await opened(domain.register(4096, ACCESS))
        cq = await opened(domain.completion_queue(256, spin_ns=spin_ns))
        there, remote_domain, remote_cq = remote_device(device), domain, cq
        if there is not device:
            remote_domain = await opened(there.resource_domain(thread_model=thread_model, message_model=message_model))
            remote_cq = await opened(remote_domain.completion_queue(256, spin_ns=spin_ns))
        target = await opened(remote_domain.register(4096, ACCESS))
        if there is not device and qp_type in UNRELIABLE:
            await opened(established_link(domain, remote_domain))
        near = await opened(domain.queue_pair(cq, capabilities=capabilities, qp_type=qp_type))
        if qp_type is QpType.XRC_SEND:
            xrc_domain = await opened(there.xrc_domain())
            srq = await opened(remote_domain.shared_receive_queue(16, 4, xrc_domain=xrc_domain, cq=remote_cq))
            far = await opened(xrc_domain.queue_pair())
            pair = Ends(
                device, domain, cq, near, far, source, target, srq, remote_domain, remote_cq, {"srq_number": srq.number}
            )
        else:
            far = await opened(remote_domain.queue_pair(remote_cq, capabilities=capabilities, qp_type=qp_type))
            pair = Ends(device, domain, cq, near, far, source, target, None, remote_domain, remote_cq)
        pair.connect(**attributes)
        if qp_type is QpType.UD:
            handle = await opened(domain.address_handle(far.local_endpoint()))
            pair.addressing = {"to": handle.to()}
        yield pair
