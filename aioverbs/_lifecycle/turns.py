"""Fairness: awaits that complete at once yield to the event loop from time to time."""

import asyncio
import threading

from aioverbs._core.data_path.data_path import spend, went_round

__all__ = ["BYTES_PER_UNIT", "LIGHT", "OPENING", "spend", "take_turn", "yield_to_loop"]

# Cost of an await that completes without yielding to the loop, in the units of `_core/data_path/loop_budget.h`.
LIGHT = 4
OPENING = 8
BYTES_PER_UNIT = 8192  # copied bytes that cost one unit: `TURN_UNIT_BYTES` there


class _Turns(threading.local):
    """Per thread: the last turn in which a task went on although the budget of the turn was used up."""

    of_last_waiter = 0


_turns = _Turns()


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


async def take_turn(units: int) -> None:
    """Wait for a turn of the loop whose budget is not used up, and charge work to it that the caller is about to do.

    Tasks that yield once all go on in the next turn. With this, the work of many tasks is spread over many turns. In
    each turn one of the waiting tasks goes on at least, whatever else uses up the budget.

    :param units: amount of work, 1 or more, in the units of `_core/data_path/loop_budget.h`.
    :raises asyncio.CancelledError: the task was cancelled; nothing was charged.
    :raises RuntimeError: no asyncio event loop is running.
    """
    asyncio.get_running_loop()  # without one, nothing would begin a new turn
    while (turn := spend(1)) and turn == _turns.of_last_waiter:
        await yield_to_loop(turn)
    _turns.of_last_waiter = turn or _turns.of_last_waiter
    spend(units - 1)
