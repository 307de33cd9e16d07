"""Threads that really are inside at the same time: refused on a thread domain, harmless elsewhere.

One thread enters the driver half of a queue pair and stays, without the GIL, in a query that waits until the device's
engine has executed a message. The message's execution does not end before it may: its receive completes to a queue
whose channel has no room to tell of it. tests/native/test_overlap.c has the calls that post and poll.
"""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from aioverbs import BusyResourceError, ConcurrentAccessError, SendFlags, SendOpcode
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from tests.core.contexts import opened
from tests.core.pairs import PATIENCE_S, End, connect, make_domain, make_end, make_queue, succeed
from tests.raw_verbs import poll, post_recv, post_send
from tests.waiting import wait_until

SIZE = 1 << 20  # of the message: calls with few bytes keep the GIL
FULL = 2**64 - 2  # an event descriptor that counts so many lets nobody write before it was read


@dataclass
class Scene:
    """Two ends for the message, and others on the same domain."""

    near: End
    far: End
    channel: handles.CompletionChannel  # of the far one
    other: End
    queue: handles.CompletionQueue
    refusals: list[str] = field(default_factory=list)
    inside: int = 0  # the thread
    _held: int | None = None  # the descriptor that the channel watches

    @property
    def context(self) -> software.Context:
        """The context of all of it."""
        context = self.near.qp.context
        assert isinstance(context, software.Context)
        return context

    def _stay(self, querying: threading.Event, left: threading.Event) -> None:
        self.inside = threading.get_native_id()
        post_send(self.near.qp, SendOpcode.SEND, [self.near.sge()], wr_id=1, flags=SendFlags.SIGNALED)
        wait_until(self._has_begun)
        querying.set()
        self.near.qp.query()
        left.set()

    def _has_begun(self) -> bool:
        return self.far.memory[1] == 1

    def _hold(self) -> None:
        told = re.search(r"^tfd:\s*(\d+)", Path(f"/proc/self/fdinfo/{self.channel.fileno()}").read_text(), re.MULTILINE)
        assert told
        self._held = int(told.group(1))
        os.eventfd_write(self._held, FULL)
        self.far.cq.request_notify()

    def let_go(self) -> None:
        """The other thread need not stay any longer."""
        held, self._held = self._held, None
        if held is not None:
            os.eventfd_read(held)

    def overlap(self, meanwhile: Callable[[], None]) -> bool:
        """Call a function while another thread is inside of `near`; whether it still was when the function returned."""
        self.far.memory[1] = 0
        post_recv(self.far.qp, [self.far.sge()])
        querying, left = threading.Event(), threading.Event()
        thread = threading.Thread(target=self._stay, args=[querying, left])
        self._hold()
        thread.start()
        try:
            wait_until(self._has_begun)
            assert querying.wait(PATIENCE_S)
            wait_until_busy(thread)
            meanwhile()
            overlapped = not left.is_set()
        finally:
            self.let_go()
            thread.join()
        assert succeed(self.near.cq).wr_id == 1
        assert succeed(self.far.cq).byte_len == SIZE
        assert self.channel.get_event() is self.far.cq
        self.far.cq.ack_events()
        return overlapped

    def refused(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except ConcurrentAccessError as error:
            self.refusals.append(str(error))
            return True
        return False


def wait_until_busy(thread: threading.Thread) -> None:
    """Until it waits for a lock of the device, which spins: it has worked for longer than anything else takes, or has
    yielded a busy processor again and again."""
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    status = Path(f"/proc/self/task/{thread.native_id}/status")

    def yields() -> int:
        told = re.search(r"^nonvoluntary_ctxt_switches:\s*(\d+)", status.read_text(), re.MULTILINE)
        assert told
        return int(told.group(1))

    end, many = time.clock_gettime(clock) + 0.02, yields() + 50
    wait_until(lambda: time.clock_gettime(clock) > end or yields() > many)


def make_scene(context: software.Context, kind: str) -> Scene:
    domain, channel = make_domain(context, kind), handles.CompletionChannel(context)
    near, far = make_end(domain, size=SIZE), make_end(domain, size=SIZE, channel=channel)
    connect(near.qp, far.qp)
    near.memory[:] = bytes(range(256)) * (SIZE // 256)
    other, peer = make_end(domain), make_end(domain)
    connect(other.qp, peer.qp)
    return Scene(near, far, channel, other, make_queue(context, domain, extended=True))


@pytest.fixture
def watched() -> Iterator[Scene]:
    """On a thread domain: no locks, but a watch."""
    with opened("engine") as context:
        yield make_scene(context, "thread domain")


@pytest.fixture
def locked() -> Iterator[Scene]:
    """On a plain protection domain: objects with locks."""
    with opened("engine") as context:
        yield make_scene(context, "plain")


@dataclass
class Call:
    """A verb that overlaps: its name, the object, and how it is called."""

    verb: str
    on: Callable[[Scene], handles.Handle]
    call: Callable[[Scene], object]


def near(scene: Scene) -> handles.QueuePair:
    return scene.near.qp


def other(scene: Scene) -> handles.QueuePair:
    return scene.other.qp


def queue(scene: Scene) -> handles.CompletionQueue:
    return scene.queue


CALLS = {
    "query another": Call("ibv_query_qp", other, lambda scene: other(scene).query()),
    "modify another": Call("ibv_modify_qp", other, lambda scene: other(scene).modify(min_rnr_timer=9)),
    "destroy a queue": Call("ibv_destroy_cq", queue, lambda scene: queue(scene).destroy()),
    "destroy another": Call("ibv_destroy_qp", other, lambda scene: other(scene).destroy()),
    "query": Call("ibv_query_qp", near, lambda scene: near(scene).query()),
    "modify": Call("ibv_modify_qp", near, lambda scene: near(scene).modify(min_rnr_timer=9)),
}


def overlap_all(scene: Scene) -> None:
    """Try every verb while another thread is inside."""

    def meanwhile() -> None:
        for name, call in CALLS.items():
            assert scene.refused(partial(call.call, scene)), name
        with pytest.raises(BusyResourceError, match="calls use it"):
            scene.near.qp.destroy()

    assert scene.overlap(meanwhile)


def test_overlapping_calls_are_refused(watched: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    context = watched.context
    before = context.counts(), watched.near.qp.query(), watched.other.qp.query()
    overlap_all(watched)
    assert watched.refusals == [
        f"{call.verb} on {call.on(watched)!r}: another call is inside of it or its thread domain; this one was refused"
        for call in CALLS.values()
    ]
    # Nothing of it was done, and the message came through.
    counts, near, other = context.counts(), watched.near.qp.query(), watched.other.qp.query()
    assert counts["overlaps"] == len(CALLS)
    assert {**counts, "overlaps": 0} == before[0]
    assert other == before[2]
    assert near.min_rnr_timer == before[1].min_rnr_timer
    assert poll(watched.near.cq) == poll(watched.other.cq) == []
    assert watched.far.memory == watched.near.memory
    capfd.readouterr()


def test_an_overlap_is_reported_once_for_each_object(watched: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    overlap_all(watched)
    lines = capfd.readouterr().err.splitlines()
    pattern = rf"soft0: \w+ on (.+ \d+) by thread {threading.get_native_id()}, while thread {watched.inside} is inside"
    matches = [re.match(pattern, line) for line in lines]
    assert len([match.group(1) for match in matches if match]) == len(lines) == 4
    assert f"queue pair {watched.near.qp.qp_num}" in {match.group(1) for match in matches if match}
    before = watched.context.counts()["overlaps"]
    overlap_all(watched)
    assert watched.context.counts()["overlaps"] == before + len(CALLS)
    assert capfd.readouterr().err == ""


def test_everything_works_afterwards(watched: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    overlap_all(watched)
    for end in (watched.other, watched.near):
        post_send(end.qp, SendOpcode.RDMA_WRITE, flags=SendFlags.SIGNALED)
        succeed(end.cq)
    watched.queue.destroy()
    watched.other.qp.destroy()
    capfd.readouterr()


def test_one_after_the_other_is_fine_from_any_thread(watched: Scene) -> None:
    """A thread domain belongs to one thread at a time, not to the one that made it."""

    def work() -> None:
        post_send(watched.other.qp, SendOpcode.RDMA_WRITE, flags=SendFlags.SIGNALED)
        succeed(watched.other.cq)

    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        work()
    assert watched.context.counts()["overlaps"] == 0


def test_without_a_thread_domain_they_are_welcome(locked: Scene) -> None:
    def meanwhile() -> None:
        post_send(locked.other.qp, SendOpcode.RDMA_WRITE, flags=SendFlags.SIGNALED)
        post_recv(locked.other.qp)
        locked.other.qp.modify(min_rnr_timer=9)
        assert poll(locked.near.cq) == poll(locked.queue) == []

    assert locked.overlap(meanwhile)
    succeed(locked.other.cq)

    def same() -> None:  # these wait for their turn
        locked.let_go()
        post_recv(locked.near.qp)
        locked.near.qp.modify(min_rnr_timer=9)
        locked.queue.destroy()

    locked.overlap(same)
    assert locked.near.qp.query().min_rnr_timer == 9
    assert locked.context.counts()["overlaps"] == 0
    assert locked.far.memory == locked.near.memory


def test_a_busy_object_is_not_destroyed(locked: Scene) -> None:
    def meanwhile() -> None:
        with pytest.raises(BusyResourceError, match="calls use it"):
            locked.near.qp.destroy()

    assert locked.overlap(meanwhile)
    assert not locked.near.qp.closed
