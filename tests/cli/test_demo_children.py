"""The processes of `aioverbs demo`: what they say, and what is told when they end too early."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from aioverbs.cli.demonstration import children
from aioverbs.cli.demonstration.children import Child, ChildEndedError, child, unless_ended
from tests.pace import patience
from tests.waiting import until


def program(name: str, code: str, folder: Path) -> Any:
    return child(name, ["-c", code], folder, {})


async def test_what_a_process_says(tmp_path: Path) -> None:
    code = "import os; print(os.environ['LAST'], flush=True); print(input()[::-1])"
    async with child("one", ["-c", code], tmp_path, {"LAST": "words"}) as one:
        assert await one.line() == "words"
        one.order("live")
        assert await one.line() == "evil"
        assert await one.wait() == 0


async def test_what_it_complained_of(tmp_path: Path) -> None:
    async with program("one", "import sys; sys.exit('first\\nlast')", tmp_path) as one:
        with pytest.raises(ChildEndedError, match=r"^one \(process \d+\) ended with status 1 before it was done: last"):
            await one.line()


async def test_an_order_that_nobody_hears(tmp_path: Path) -> None:
    async with program("one", "", tmp_path) as one:
        assert await one.wait() == 0
        stdin = one._process.stdin
        assert stdin is not None
        await until(stdin.is_closing)
        await asyncio.sleep(0)  # by now it is closed
        one.order("work")
        with pytest.raises(ChildEndedError, match="ended with status 0 before it was done"):
            await one.line()


async def test_one_that_does_not_end_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_END_S", 0.1)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(); time.sleep(60)"
    async with program("one", code, tmp_path) as one:
        await one.line()
    assert await one.wait() == -9


WAITING = "print(); input()"
ENDING = "print(); input(); raise SystemExit(3)"


async def test_work_is_done_while_a_process_is_there(tmp_path: Path) -> None:
    async def work() -> int:
        return 7

    async with program("one", WAITING, tmp_path) as one:
        assert await unless_ended(one, work()) == 7


async def test_work_ends_when_the_process_does(tmp_path: Path) -> None:
    ended = False

    async def work(one: Child) -> None:
        nonlocal ended
        await one.line()
        one.order("end")
        try:
            await asyncio.sleep(60)
        finally:
            ended = True

    async with program("one", ENDING, tmp_path) as one:
        with pytest.raises(ChildEndedError, match="ended with status 3"):
            await unless_ended(one, work(one))
    assert ended


async def test_the_end_of_the_process_is_told_and_not_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "_NOTICED_S", patience(20))

    async def work(one: Child) -> None:
        await one.line()
        one.order("end")
        raise ChildEndedError("another one failed")

    async with program("one", ENDING, tmp_path) as one:
        with pytest.raises(ChildEndedError, match=r"^one "):
            await unless_ended(one, work(one))


async def test_what_has_nothing_to_do_with_the_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_NOTICED_S", 0.1)

    async def work() -> None:
        raise ChildEndedError("another one failed")

    async with program("one", WAITING, tmp_path) as one:
        with pytest.raises(ChildEndedError, match="another one failed"):
            await unless_ended(one, work())


async def test_who_was_started_by_somebody_else_is_not_tethered(tmp_path: Path) -> None:
    arguments = ["-m", "aioverbs.cli.demonstration.tethered", f"{os.getppid()}", str(tmp_path / "never.py")]
    async with child("one", arguments, tmp_path, {}) as one:
        with pytest.raises(ChildEndedError, match=rf"status 1 before it was done: process {os.getppid()} is gone"):
            await one.line()
