"""Fairness: awaits that complete at once yield to the event loop from time to time."""

import asyncio
import threading
from collections import deque

from aioverbs._core.data_path.data_path import spend, went_round

__all__ = ["BYTES_PER_UNIT", "LIGHT", "OPENING", "spend", "take_turn", "yield_to_loop"]

# Cost of an await that completes without yielding to the loop, in the units of `_core/data_path/loop_budget.h`.
LIGHT = 4
OPENING = 8
BYTES_PER_UNIT = 8192  # copied bytes that cost one unit: `TURN_UNIT_BYTES` there


async def yield_to_loop(turn: int) -> None:
    """Let other tasks run once. Call this if `spend` returned a number other than 0: the turn of this task is over.

    If this is cancelled, the caller must release what it has acquired. If no asyncio event loop is running, nothing is
    done, because other libraries schedule tasks by rules of their own.

    :param turn: number that `spend` returned.
    :raises asyncio.CancelledError: the task was cancelled.
    """
    if asyncio._get_running_loop() is None:
        return
    try:
        await asyncio.sleep(0)
    finally:
        went_round(turn)


class _Queue(threading.local):
    """Per thread: the tasks that wait for a turn of its event loop, the first one first."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiting: deque[tuple[asyncio.Future[None], int]] = deque()  # each with its amount of work


_queue = _Queue()


async def take_turn(units: int) -> None:
    """Wait for a turn of the loop whose budget is not used up, and charge work to it that the caller is about to do.

    Tasks that yield once all go on in the next turn. With this, the work of many tasks is spread over many turns, in
    the order of their calls. In each turn one of the waiting tasks goes on at least, whatever else uses up the budget.

    :param units: amount of work, 1 or more, in the units of `_core/data_path/loop_budget.h`.
    :raises asyncio.CancelledError: the task was cancelled.
    :raises RuntimeError: no asyncio event loop is running.
    """
    loop = asyncio.get_running_loop()
    if _queue.loop is not loop:  # a loop that ran before, and may go on, keeps its own
        _queue.loop, _queue.waiting = loop, deque()
    if not _queue.waiting:
        turn = spend(0)
        if not turn:
            spend(units)
            return
        loop.call_soon(_next_turn, turn, _queue.waiting)  # first: a signal handler may raise at any point
    waiter = loop.create_future()
    _queue.waiting.append((waiter, units))
    await waiter


def _next_turn(turn: int, waiting: deque[tuple[asyncio.Future[None], int]]) -> None:
    """Let waiting tasks go on in a new turn of the loop: one, and others as far as the budget of the turn suffices.

    :param turn: number of the turn before.
    :param waiting: the tasks, as in `_Queue`.
    """
    went_round(turn)
    turn = 0
    try:
        while waiting and not turn:
            waiter, units = waiting[0]
            if not waiter.done():  # not cancelled
                turn = spend(units)
                waiter.set_result(None)
            waiting.popleft()
    finally:
        if waiting:
            asyncio.get_running_loop().call_soon(_next_turn, turn, waiting)
