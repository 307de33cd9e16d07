"""Event loops that sleep on a completion channel's descriptor while the device works."""

import asyncio
import time

from aioverbs import SendFlags, SendOpcode
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from tests.core.contexts import opened
from tests.core.pairs import PATIENCE_S, End, connect, make_domain, make_end
from tests.waiting import wait_until

WRITE, SEND = SendOpcode.RDMA_WRITE, SendOpcode.SEND
SIGNALED = SendFlags.SIGNALED


class Sleeper:
    """Waits for the completions of a queue as a loop does: asks for an event, polls once more, sleeps."""

    def __init__(self, cq: handles.CompletionQueue) -> None:
        assert cq.channel is not None
        self.cq, self.channel = cq, cq.channel
        self.polls = self.sleeps = 0

    def _poll(self) -> list[handles.WorkCompletion]:
        self.polls += 1
        return self.cq.poll(1)

    async def _sleep(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        self.sleeps += 1
        loop.add_reader(self.channel.fileno(), readable.set)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await readable.wait()
        finally:
            loop.remove_reader(self.channel.fileno())
        while (queue := self.channel.get_event()) is not None:
            queue.ack_events()

    async def completion(self) -> handles.WorkCompletion:
        while not (found := self._poll()):
            self.cq.request_notify()
            if found := self._poll():
                break
            await self._sleep()
        return found[0]


def connected(context: software.Context, kind: str) -> tuple[End, End]:
    domain, channel = make_domain(context, kind), handles.CompletionChannel(context)
    near, far = (make_end(domain, channel=channel) for _ in range(2))
    connect(near.qp, far.qp)
    return near, far


async def test_messages_wake_a_loop_up(context: software.Context, kind: str) -> None:
    near, far = connected(context, kind)
    sleeper = Sleeper(far.cq)
    for number in range(20):
        far.qp.post_recv([far.sge(0, 8)], wr_id=number)
        near.memory[:8] = number.to_bytes(8, "big")
        near.qp.post_send(SEND, [near.sge(0, 8)])
        assert (await sleeper.completion()).wr_id == number
        assert far.memory[:8] == near.memory[:8]


async def test_nothing_is_missed_between_asking_and_sleeping(context: software.Context, kind: str) -> None:
    """Whenever the completion comes, either the poll after asking sees it or the event."""
    near, _ = connected(context, kind)
    sleeper = Sleeper(near.cq)
    for number in range(200):
        near.qp.post_send(WRITE, wr_id=number, flags=SIGNALED)
        assert (await sleeper.completion()).wr_id == number


async def test_the_loop_really_sleeps(kind: str) -> None:
    """While the device takes its time, the loop runs nothing; it polls no more often than it is woken up."""
    delay_s, rounds = 0.02, 5
    with opened("engine") as context:
        near, _ = connected(context, kind)
        sleeper = Sleeper(near.cq)

        def take_time(number: int) -> None:
            """In a thread: nothing is done before the loop sleeps, however late that is."""
            wait_until(lambda: sleeper.sleeps == number)
            time.sleep(delay_s)
            context.faults.unhold()

        start, busy = time.monotonic(), time.thread_time()
        for number in range(1, rounds + 1):
            context.faults.hold(near.qp)
            near.qp.post_send(WRITE, flags=SIGNALED)
            taking_time = asyncio.create_task(asyncio.to_thread(take_time, number))
            await sleeper.completion()
            await taking_time
        elapsed, busy = time.monotonic() - start, time.thread_time() - busy
    assert elapsed >= rounds * delay_s
    assert busy < elapsed / 2
    assert sleeper.sleeps == rounds
    assert sleeper.polls == 3 * rounds


async def test_other_tasks_run_meanwhile() -> None:
    with opened("engine") as context:
        near, _ = connected(context, "plain")
        context.faults.hold(near.qp)
        near.qp.post_send(WRITE, flags=SIGNALED)
        sleeper = Sleeper(near.cq)
        waiting = asyncio.create_task(sleeper.completion())
        for _ in range(4):
            await asyncio.sleep(0.001)
        assert sleeper.sleeps == 1
        assert not waiting.done()
        context.faults.unhold()
        await waiting


async def test_one_loop_sleeps_for_several_queues() -> None:
    """Each on a channel of its own."""
    with opened("engine-delayed", delay_ns=10_000_000) as context:
        ends = [connected(context, "plain")[0] for _ in range(4)]
        for number in (2, 0, 3, 1):
            ends[number].qp.post_send(WRITE, wr_id=number, flags=SIGNALED)
        found = await asyncio.gather(*(Sleeper(end.cq).completion() for end in ends))
    assert [completion.wr_id for completion in found] == [0, 1, 2, 3]
