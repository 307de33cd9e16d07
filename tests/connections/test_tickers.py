"""Connections share the timer of their keep-alives."""

import asyncio
from contextvars import ContextVar
from typing import Any, cast

import pytest

from aioverbs._connection.liveness import Ticker
from tests.waiting import until


class Member:
    """Member of a ticker that counts its ticks, and may leave or fail at the first one."""

    def __init__(self, ticker: Ticker, *, leaves: bool = False, fails: bool = False) -> None:
        self.ticker, self.leaves, self.fails, self.ticks = ticker, leaves, fails, 0
        ticker.add(cast(Any, self))

    def tick(self) -> None:
        self.ticks += 1
        if self.leaves:
            self.ticker.discard(cast(Any, self))
        if self.fails:
            raise ZeroDivisionError


async def test_members_are_called_at_each_interval_until_they_leave() -> None:
    ticker = Ticker(0.01)
    staying, leaving = Member(ticker), Member(ticker, leaves=True)
    await until(lambda: staying.ticks >= 3)
    assert leaving.ticks == 1
    ticker.discard(cast(Any, staying))
    seen = staying.ticks
    await asyncio.sleep(0.05)
    assert staying.ticks == seen
    again = Member(ticker, leaves=True)
    await until(lambda: again.ticks == 1)


async def test_many_members_are_called_in_many_turns_of_the_loop() -> None:
    """Each once, so that an interval with very many connections does not block the loop."""
    ticker, loop = Ticker(0.05), asyncio.get_running_loop()
    members = [Member(ticker, leaves=True) for _ in range(1000)]
    seen, most = 0, 0

    def next_turn() -> None:
        nonlocal seen, most
        done = sum(member.ticks for member in members)
        seen, most = done, max(most, done - seen)
        if done < len(members):
            loop.call_soon(next_turn)

    next_turn()
    await until(lambda: seen == len(members))
    assert most <= 2 * 64
    assert all(member.ticks == 1 for member in members)


async def test_members_are_called_although_another_one_fails() -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    ticker = Ticker(0.01)
    members = [Member(ticker), Member(ticker, fails=True), Member(ticker)]
    await until(lambda: all(member.ticks >= 3 for member in members))
    assert errors
    for member in members:
        ticker.discard(cast(Any, member))


@pytest.mark.parametrize("count", [1, 2])
async def test_a_member_may_leave_before_its_call(count: int) -> None:
    ticker = Ticker(0.01)
    members = [Member(ticker) for _ in range(count)]
    for member in members:
        ticker.discard(cast(Any, member))
        ticker.discard(cast(Any, member))
    await asyncio.sleep(0.03)
    assert not any(member.ticks for member in members)


async def test_no_member_is_kept_after_all_have_left_in_the_middle_of_a_tick() -> None:
    ticker = Ticker(0.01)
    members = [Member(ticker) for _ in range(100)]
    await until(lambda: any(member.ticks for member in members))
    for member in members:
        ticker.discard(cast(Any, member))
    assert not ticker._due
    seen = sum(member.ticks for member in members)
    await asyncio.sleep(0.05)
    assert sum(member.ticks for member in members) == seen


async def test_members_are_not_called_in_the_context_of_the_first_one() -> None:
    """So that what a task keeps in its context does not live as long as any connection of its loop."""
    variable: ContextVar[str] = ContextVar("variable", default="none")
    seen = []

    class Reader(Member):
        def tick(self) -> None:
            seen.append(variable.get())

    variable.set("first")
    ticker = Ticker(0.005)
    reader = Reader(ticker)
    await until(lambda: len(seen) >= 3)
    ticker.discard(cast(Any, reader))
    assert set(seen) == {"none"}
