"""Messages that a finalizer sends in the middle of another send on the same connection."""

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Generator

import anyio
import pytest

from aioverbs import ConcurrentAccessError, Connection, Device, ThreadModel, connect, listen
from aioverbs._connection.connection import send_constant_nowait
from tests.connections.ends import HOST, SMALL, deeper, pair, works
from tests.connections.test_messages import sample

ROOMY = deeper(SMALL, receive_depth=64, send_buffers=8, send_depth=32)


@contextlib.contextmanager
def finalizer(call: Callable[[], object], objects: int) -> Generator[None]:
    """Call a function by a finalizer, in the garbage collection that begins when the block has made some objects.

    From Python 3.12 on, the collection begins between two instructions of Python, and not while an object is made.
    """

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            call()

    before = gc.get_threshold()
    gc.disable()
    gc.collect()
    Garbage()
    gc.set_threshold(gc.get_count()[0] + 1 + objects, 1000, 1000)
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
        gc.set_threshold(*before)
        gc.collect()  # if the block has made fewer objects
        gc.enable()


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


async def test_no_more_messages_are_announced_than_the_peer_allows(device: Device) -> None:
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
            with finalizer(lambda near=ends.near: announce(near), objects):  # type: ignore[misc]
                announce(ends.near)
            for _ in range(sent):
                assert await ends.far.receive() == message
            await works(ends.near, ends.far)
