"""A first transfer on the software device: two queue pairs, an RDMA WRITE, an RDMA READ back, a message.

It uses the compiled core directly, which is what there is until devices and awaitable verbs come on top of it.
"""

import asyncio
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aioverbs import AccessFlags, Mtu, QpState, SendFlags, SendOpcode, WcStatus
from aioverbs._core.handles import handles, parent_domain
from aioverbs._providers import software
from aioverbs.attributes import AddressVector

SIZE = 1 << 20
REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ


@contextmanager
def destroying(context: handles.Context) -> Iterator[None]:
    """Destroy what was made of a context, newest first, and the context."""
    try:
        yield
    finally:
        for handle in reversed([handle for handle in handles.open_handles() if handle.context is context]):
            handle.destroy()


def connect(qp: handles.QueuePair, peer: handles.QueuePair) -> None:
    """Take a queue pair through INIT and RTR to RTS."""
    gid = peer.context.query_gid(1, 1)
    qp.modify(QpState.INIT, pkey_index=0, port_num=1, qp_access_flags=REMOTE)
    qp.modify(
        QpState.RTR,
        path_mtu=Mtu.MTU_4096,
        dest_qp_num=peer.qp_num,
        rq_psn=0,
        max_dest_rd_atomic=16,
        min_rnr_timer=12,
        av=AddressVector(dgid=gid, sgid_index=1),
    )
    qp.modify(QpState.RTS, timeout=14, retry_cnt=7, rnr_retry=7, sq_psn=0, max_rd_atomic=16)


async def completion(cq: handles.CompletionQueue, channel: handles.CompletionChannel) -> handles.WorkCompletion:
    """Sleep on the completion channel until something is done."""
    loop = asyncio.get_running_loop()
    cq.request_notify()
    while not (found := cq.poll(1)):
        readable = asyncio.Event()
        loop.add_reader(channel.fileno(), readable.set)
        try:
            await asyncio.wait_for(readable.wait(), timeout=10)
        finally:
            loop.remove_reader(channel.fileno())
        while (queue := channel.get_event()) is not None:
            queue.ack_events()
        cq.request_notify()
    if found[0].status is not WcStatus.SUCCESS:
        raise RuntimeError(f"the transfer failed: {found[0]}")
    return found[0]


async def transfer(context: handles.Context) -> None:
    """Move a megabyte there and back, and say hello."""
    pd = handles.ProtectionDomain(context)
    td = parent_domain.ThreadDomain(context)
    domain = parent_domain.ParentDomain(pd, td)
    channel = handles.CompletionChannel(context)
    cq = handles.CompletionQueue(context, 64, channel, parent_domain=domain)
    near, far = handles.QueuePair(domain, cq, cq), handles.QueuePair(domain, cq, cq)
    connect(near, far)
    connect(far, near)
    source, target, back = bytearray(os.urandom(SIZE)), bytearray(SIZE), bytearray(SIZE)
    local, remote, returned = (handles.MemoryRegion(pd, memory, REMOTE) for memory in (source, target, back))
    print(f"{context.name}: queue pairs {near.qp_num} and {far.qp_num} on one thread domain, which takes no locks")

    for name, opcode, region in (
        ("RDMA WRITE", SendOpcode.RDMA_WRITE, local),
        ("RDMA READ", SendOpcode.RDMA_READ, returned),
    ):
        start = time.perf_counter()
        near.post_send(
            opcode,
            [(region.address, SIZE, region.lkey)],
            flags=SendFlags.SIGNALED,
            remote_addr=remote.address,
            rkey=remote.rkey,
        )
        await completion(cq, channel)
        elapsed = time.perf_counter() - start
        print(f"{name} of {SIZE >> 10} KiB: {elapsed * 1e6:.0f} us, {SIZE / elapsed / 1e9:.1f} GB/s")

    if not source == target == back:
        raise RuntimeError("what arrived is not what was sent")
    print(f"verified: SHA-256 {hashlib.sha256(back).hexdigest()[:16]}… on both sides")

    far.post_recv([(remote.address, 64, remote.lkey)])
    source[:5] = b"hello"
    near.post_send(SendOpcode.SEND, [(local.address, 5, local.lkey)])
    message = await completion(cq, channel)
    print(f"SEND: {bytes(target[: message.byte_len])!r} arrived on queue pair {message.qp_num}")


def main() -> None:
    context = software.open_context(engine_mode=True)
    with destroying(context):
        asyncio.run(transfer(context))
    print(f"everything was given back: {len(handles.open_handles())} handles open")


if __name__ == "__main__":
    main()
