"""Messages and requests that a finalizer posts in the middle of another call on the same connection or queue pair."""

import asyncio
import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable, Generator, Iterator

import anyio
import pytest

from aioverbs import (
    BrokenResourceError,
    ConcurrentAccessError,
    Connection,
    Device,
    MessageModel,
    QpCapabilities,
    ThreadModel,
    connect,
    listen,
)
from aioverbs._connection.connection import end_of, send_constant_nowait
from aioverbs._connection.wire import FrameKind
from aioverbs._core.data_path.data_path import Inbox, Operation, WorkQueue
from tests.connections.ends import HOST, SMALL, deeper, pair, works
from tests.connections.test_messages import sample
from tests.data_path.ends import ends
from tests.pace import patience

ROOMY = deeper(SMALL, receive_depth=64, send_buffers=8, send_depth=32)


@pytest.fixture(autouse=True)
def without_older_objects() -> Iterator[None]:
    """Let collections take no time for the objects of other tests."""
    gc.freeze()
    yield
    gc.unfreeze()


class Cycle:
    """Object that only the garbage collector frees."""

    def __init__(self, kept: object = None) -> None:
        self.itself = self
        self.kept = kept


@contextlib.contextmanager
def collection(make_garbage: Callable[[], object], objects: int) -> Generator[None]:
    """Make garbage, and let the garbage collection begin when the block has made some objects.

    From Python 3.12 on, the collection begins between two instructions of Python, and not while an object is made.
    """
    before = gc.get_threshold()
    gc.disable()
    gc.collect()
    lists: list[object] = [[] for _ in range(100)]  # more than Python keeps for reuse, so that the block makes new ones
    make_garbage()
    gc.set_threshold(gc.get_count()[0] + 1 + objects, 1000, 1000)
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
        gc.set_threshold(*before)
        del lists
        gc.collect()  # if the block has made fewer objects
        gc.enable()


def finalizer(call: Callable[[], object], objects: int) -> contextlib.AbstractContextManager[None]:
    """Call a function by a finalizer, in the garbage collection that begins when the block has made some objects."""

    class Garbage(Cycle):
        def __del__(self) -> None:
            call()

    return collection(Garbage, objects)


class Nested:
    """Sends a short message in the middle of another send, if that is possible."""

    def __init__(self, connection: Connection) -> None:
        self.sent = 0
        self._connection = connection

    def __call__(self) -> None:
        with contextlib.suppress(anyio.WouldBlock, ConcurrentAccessError):
            self._connection.send_nowait(b"nested")
            self.sent += 1


@pytest.mark.parametrize("model", ThreadModel)
async def test_each_message_is_sent_from_a_buffer_of_its_own(device: Device, model: ThreadModel) -> None:
    async with (
        device.resource_domain(thread_model=model) as domain,
        listen(HOST, domain=domain, settings=ROOMY) as listener,
        await connect(HOST, listener.port, domain=domain, settings=ROOMY) as near,
        await listener.accept() as far,
    ):
        nested = Nested(near)
        for objects in range(60):
            nested.sent = 0
            message = b"outer %d" % objects
            with finalizer(nested, objects % 20):
                await near.send(message)
            got = Counter([await far.receive() for _ in range(1 + nested.sent)])
            assert got == Counter({message: 1, b"nested": nested.sent})


async def test_no_message_comes_between_the_fragments_of_another(device: Device) -> None:
    async with pair(device, deeper(ROOMY, send_buffers=16)) as ends:
        nested = Nested(ends.near)
        for objects in range(60):
            nested.sent = 0
            with finalizer(nested, objects):
                assert send_constant_nowait(ends.near, sample(8000, objects))
            got = Counter([await ends.far.receive() for _ in range(1 + nested.sent)])
            assert got == Counter({sample(8000, objects): 1, b"nested": nested.sent})


async def test_no_more_messages_are_announced_than_the_peer_allows(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioverbs._connection.announcer._COPIED_BYTES", 0)
    message = bytes(400_000)
    sent = 0

    def announce(connection: Connection) -> None:
        nonlocal sent
        is_sent = send_constant_nowait(connection, message)  # another one may be sent in the middle
        sent += is_sent

    for objects in range(20):
        async with pair(device, deeper(ROOMY, receive_depth=16)) as ends:
            sent = 0
            while sent < 2:
                announce(ends.near)
            with finalizer(functools.partial(announce, ends.near), objects):
                announce(ends.near)
            for _ in range(sent):
                assert await ends.far.receive() == message
            await works(ends.near, ends.far)


async def test_a_control_message_is_sent_once(device: Device) -> None:
    async with pair(device, ROOMY) as ends:
        sender = end_of(ends.near).channel.sender
        for objects in range(30):
            posted = ends.near.qp.statistics().sends.posted
            with finalizer(sender.use_credits, objects):
                sender.send_control(FrameKind.CREDITS)
            assert ends.near.qp.statistics().sends.posted == posted + 1
            await works(ends.near, ends.far)


async def test_requests_are_posted_that_are_chained_in_the_middle_of_another(device: Device) -> None:
    async with ends(device, thread_model=ThreadModel.SAFE, message_model=MessageModel.HIGH_BANDWIDTH) as pair:
        for objects in range(20):
            posted: list[Operation[None]] = []

            def write(data: bytes, posted: list[Operation[None]] = posted) -> None:
                posted.append(pair.write(data, 8 * len(posted)))

            with finalizer(functools.partial(write, b"nested"), objects):
                write(b"outer")
            async with asyncio.timeout(patience(5)):
                for each in posted:
                    await each
            assert len(posted) == 2


async def test_all_inboxes_end_with_their_queue(device: Device) -> None:
    for objects in range(10):
        async with ends(device) as pair:
            work = pair.far._work
            assert work is not None
            queue = work.receive_queue
            assert queue is not None
            inboxes: list[Inbox] = []

            def make(queue: WorkQueue = queue, inboxes: list[Inbox] = inboxes) -> None:
                inboxes.append(Inbox(queue, lambda received: received, lambda _: None))

            for _ in range(2):
                with finalizer(make, objects):
                    make()
            pair.far.to_error()
            for inbox in inboxes:
                async with asyncio.timeout(patience(5)):
                    with pytest.raises(BrokenResourceError):
                        await anext(inbox)
            assert len(inboxes) == 4


async def test_inboxes_that_are_collected_while_their_queue_ends(device: Device) -> None:
    """Their weak references are removed from the list that is being read."""
    async with ends(device) as pair:
        pair.far.to_error()
        work = pair.far._work
        assert work is not None
        queue = work.receive_queue
        assert queue is not None

        def drop_inboxes() -> None:
            for _ in range(25):  # Python does not keep tuples of that length for reuse
                Cycle(Inbox(queue, lambda received: received, lambda _: None))

        for objects in range(10):
            with collection(drop_inboxes, objects):
                work.errored()


async def test_a_place_is_not_taken_twice(device: Device) -> None:
    capabilities = QpCapabilities(max_send_wr=4)
    async with ends(device, thread_model=ThreadModel.SAFE, capabilities=capabilities) as pair:
        counter = pair.target.remote()[:8]
        operations: list[Operation[int]] = []
        refused: list[int] = []

        def add_nested() -> None:
            try:
                operations.append(pair.near.fetch_and_add_nowait(counter, 1))
            except anyio.WouldBlock:
                refused.append(objects)

        for objects in range(20):
            operations[:] = [pair.near.fetch_and_add(counter, 1) for _ in range(3)]
            with finalizer(add_nested, objects):
                operations.append(pair.near.fetch_and_add(counter, 1))
            async with asyncio.timeout(patience(5)):
                for each in operations:
                    await each
            assert len(operations) == (4 if objects in refused else 5)
