"""Completions are reported in the order in which they arrived, whatever code polls for newer ones meanwhile.

Other Python code can run while completions are reported: signal handlers, finalizers, other threads. A profile function
stands in for all of these, since it runs at a chosen call.
"""

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from aioverbs import Device, QpCapabilities, ThreadModel
from tests.data_path.ends import ends
from tests.data_path.test_messages import Postbox
from tests.pace import patience
from tests.waiting import wait_until

MESSAGES = 40  # more than one poll takes from the queue


@contextlib.contextmanager
def at_each_message(what: Callable[[], object]) -> Iterator[None]:
    """Do that when each message that is received is told of."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "_message":
            what()

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@pytest.mark.every_way
async def test_messages_keep_their_order_where_their_teller_asks_for_more(device: Device) -> None:
    asked = []
    async with (
        ends(device, capabilities=QpCapabilities(max_send_wr=MESSAGES)) as pair,
        Postbox(pair, MESSAGES) as box,
    ):
        pair.source.buffer[:MESSAGES] = bytes(range(MESSAGES))
        *_, sent = [pair.near.send(pair.source[number : number + 1]) for number in range(MESSAGES)]
        time.sleep(patience(0.05))  # noqa: ASYNC251  # all of them complete, and no poll happens
        seen = []
        with at_each_message(lambda: asked.append(sent.done())):
            async with asyncio.timeout(patience(10)):
                for _ in range(MESSAGES):
                    with await anext(box.qp.messages()) as message:
                        seen.append(message.data[0])
                await sent
    assert seen == list(range(MESSAGES))
    assert len(asked) == MESSAGES
    assert not asked[0]


@pytest.mark.every_way
async def test_a_waiter_hears_of_what_came_while_another_thread_told(device: Device) -> None:
    """Report completions that arrive while another thread reports earlier ones.

    The loop polls and goes to sleep meanwhile; it is notified once that thread is finished.
    """
    telling, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        telling.set()
        go_on.wait(patience(10))

    def ask() -> None:
        with at_each_message(hold):
            wait_until(sent.done)

    async with ends(device, thread_model=ThreadModel.SAFE) as pair, Postbox(pair) as box:
        sent = pair.near.send(pair.source[:1])
        thread = threading.Thread(target=ask)
        thread.start()
        assert telling.wait(patience(10))  # the loop does not poll meanwhile
        written = pair.near.write(pair.source[:8], pair.target.remote()[:8])
        asyncio.get_running_loop().call_later(patience(0.05), go_on.set)
        async with asyncio.timeout(patience(5)):
            await written
            with await anext(box.qp.messages()) as message:
                assert message.byte_len == 1
        thread.join()
