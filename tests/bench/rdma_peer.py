"""The echo of `rdma_baseline.c` written by hand with uvloop and the package `ibverbs`, with the same arguments.

    python rdma_peer.py ask|answer awaits|bare LENGTH WINDOW OPERATIONS GID_INDEX NEAR FAR

`awaits` offers as much as the library: awaitable requests, hence a future for each. `bare` does nothing but this echo:
one task handles completions directly, with a future for each sleep only. Both poll before they sleep, and create their
requests once to post them repeatedly.
"""

import asyncio
import ctypes
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial

import ibverbs as ib
import uvloop

BATCH = 16


def exchange_lines(line: str) -> str:
    """Send a line to the other process, and return its line."""
    print(line, flush=True)
    return sys.stdin.readline().strip()


class End:
    """A queue pair, and memory for messages, each with a send request and a receive request."""

    def __init__(self, device: str, length: int, places: int, gid_index: int) -> None:
        (named,) = (each for each in ib.get_device_list() if each.name == device)
        self.context = named.open()
        self.gid_index = gid_index
        self.pd = self.context.alloc_pd()
        self.channel = self.context.create_comp_channel()
        os.set_blocking(self.channel.fd, False)
        self.cq = self.context.create_cq(2 * places, channel=self.channel)
        self.memory = ctypes.create_string_buffer(places * length)
        self.mr = self.pd.reg_mr(ctypes.addressof(self.memory), places * length, ib.AccessFlags.LOCAL_WRITE)
        self.qp = self.pd.create_qp(
            ib.QPInitAttr(
                send_cq=self.cq, recv_cq=self.cq, qp_type=ib.QPType.RC, max_send_wr=places, max_recv_wr=places
            )
        )
        self.qp.to_init(1, ib.AccessFlags.LOCAL_WRITE)
        pieces = [self.mr.sge(length, place * length) for place in range(places)]
        # Each request is a list, as posting takes it. wr_id is the message's index, for receives plus the number of
        # messages.
        self.sends = [
            [ib.SendWR(place, [piece], int(ib.WROpcode.SEND), int(ib.SendFlags.SIGNALED))]
            for place, piece in enumerate(pieces)
        ]
        self.receives = [[ib.RecvWR(places + place, [piece])] for place, piece in enumerate(pieces)]
        self.loop = asyncio.get_running_loop()
        self.waiter: asyncio.Future[None] | None = None
        self.futures: dict[int, asyncio.Future[None]] = {}
        self.places = places
        self.events = 0
        self.loop.add_reader(self.channel.fd, self.readable)

    def connect(self) -> None:
        here = ib.local_qp_info(self.qp, self.context.query_port(1), self.context.query_gid(1, self.gid_index), port=1)
        there = ib.QPInfo.from_bytes(bytes.fromhex(exchange_lines(here.to_bytes().hex())))
        self.qp.to_rtr(there, self.gid_index, hop_limit=64)
        self.qp.to_rts(0, retry_cnt=6, rnr_retry=6)
        self.cq.req_notify()
        exchange_lines("ready")

    def readable(self) -> None:
        self.channel.get_cq_event()
        self.events += 1
        self.cq.ack_events(1)
        self.cq.req_notify()
        if self.waiter is not None:
            self.waiter.set_result(None)
            self.waiter = None
        self.dispatch()

    def dispatch(self) -> None:
        """Resolve the futures of completed requests."""
        futures = self.futures
        if not futures:
            return
        while found := self.cq.poll(BATCH):
            for completion in found:
                if completion.status:
                    completion.raise_for_status()
                futures.pop(completion.wr_id).set_result(None)

    def send(self, place: int) -> asyncio.Future[None]:
        """Post a send; return a future of its completion."""
        future = self.futures[place] = self.loop.create_future()
        self.qp.post_send(self.sends[place])
        return future

    def receive(self, place: int) -> asyncio.Future[None]:
        """Post a receive; return a future of its completion."""
        future = self.futures[self.places + place] = self.loop.create_future()
        self.qp.post_recv(self.receives[place])
        return future

    async def until(self, future: asyncio.Future[None]) -> None:
        """Poll once, then sleep until the future is done."""
        if not future.done():
            self.dispatch()
            if not future.done():
                await future

    async def take(self) -> list[ib.WC]:
        """Return some completions, at least one."""
        while not (found := self.cq.poll(BATCH)):
            self.waiter = self.loop.create_future()
            await self.waiter
        for completion in found:
            if completion.status:
                completion.raise_for_status()
        return found


async def ask_bare(end: End, window: int, operations: int) -> None:
    """Send messages from the first `window` slots, and receive their echoes into as many others."""
    places = 2 * window
    sends, receives, post_send, post_recv = end.sends, end.receives, end.qp.post_send, end.qp.post_recv
    posted = sent = came = 0
    for posted in range(min(window, operations)):
        post_send(sends[posted])
    posted = min(window, operations)
    while sent < operations or came < operations:
        for completion in await end.take():
            wr_id = completion.wr_id
            if wr_id >= places:
                came += 1
                post_recv(receives[wr_id - places])
            else:
                sent += 1
            if posted < operations and posted - sent < window and posted - came < window:
                post_send(sends[posted % window])
                posted += 1


async def answer_bare(end: End, window: int, operations: int) -> None:
    """Send each message back from its slot, and receive into that slot again once it is sent."""
    places = 2 * window
    sends, receives, post_send, post_recv = end.sends, end.receives, end.qp.post_send, end.qp.post_recv
    sent = 0
    while sent < operations:
        for completion in await end.take():
            wr_id = completion.wr_id
            if wr_id >= places:
                post_send(sends[wr_id - places])
            else:
                sent += 1
                post_recv(receives[wr_id])


Receives = deque[tuple[asyncio.Future[None], int]]


async def ask_awaiting(end: End, window: int, receives: Receives, operations: int) -> None:
    """Send messages as `rdma_library.py` does."""
    sends = deque((end.send(place), place) for place in range(min(window, operations)))
    for remaining in range(operations, 0, -1):
        arriving, free = receives.popleft()
        await end.until(arriving)
        receives.append((end.receive(free), free))
        sent, place = sends.popleft()
        await end.until(sent)
        if remaining > window:
            sends.append((end.send(place), place))


async def answer_awaiting(end: End, window: int, receives: Receives, operations: int) -> None:
    """Send messages back as `rdma_library.py` does."""
    sending: Receives = deque()
    for _ in range(operations):
        arriving, place = receives.popleft()
        await end.until(arriving)
        sending.append((end.send(place), place))
        if len(sending) == window:
            sent, free = sending.popleft()
            await end.until(sent)
            receives.append((end.receive(free), free))
    for sent, free in sending:
        await end.until(sent)
        receives.append((end.receive(free), free))


async def timed(work: Callable[[int], Awaitable[None]], end: End, operations: int) -> str:
    """Run a tenth of the operations as a warm-up, then measure all; return the output line."""
    await work(operations // 10 + 1)
    slept, began = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw, time.perf_counter_ns()
    end.events = 0
    await work(operations)
    took = time.perf_counter_ns() - began
    slept = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - slept
    return f"{took / operations} {slept / operations} {end.events / operations}"


async def echo(what: str, how: str, length: int, window: int, operations: int, gid_index: int, near: str) -> None:
    end = End(near, length, 2 * window, gid_index)
    places = range(window, 2 * window) if what == "ask" else range(2 * window)
    if how == "bare":
        for place in places:
            end.qp.post_recv(end.receives[place])
        work = partial(ask_bare if what == "ask" else answer_bare, end, window)
    else:
        receives: Receives = deque((end.receive(place), place) for place in places)
        work = partial(ask_awaiting if what == "ask" else answer_awaiting, end, window, receives)
    end.connect()
    answer = await timed(work, end, operations)
    exchange_lines("done")
    print(answer)


if __name__ == "__main__":
    what, how, *numbers, near, _ = sys.argv[1:]
    length, window, operations, gid_index = map(int, numbers)
    uvloop.run(echo(what, how, length, window, operations, gid_index, near))
