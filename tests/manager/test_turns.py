"""Tasks take turns of the loop for work that they do at once."""

import asyncio

import pytest

from aioverbs._lifecycle.turns import BYTES_PER_UNIT, spend, take_turn
from tests.conftest import ROOT

WHOLE_TURN = 512  # more than the largest share


async def taken_in_turns(count: int, units: int) -> list[list[int]]:
    """Let tasks take turns; return their numbers by turn of the loop."""
    turns: list[list[int]] = [[]]

    async def take(number: int) -> None:
        await take_turn(units)
        turns[-1].append(number)

    tasks = [asyncio.create_task(take(number)) for number in range(count)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        turns.append([])
    return [turn for turn in turns if turn]


async def test_one_task_has_each_turn_if_its_work_fills_it() -> None:
    spend(WHOLE_TURN)
    assert await taken_in_turns(50, WHOLE_TURN) == [[number] for number in range(50)]


async def test_tasks_share_a_turn_if_their_work_is_small() -> None:
    turns = await taken_in_turns(200, 4)
    assert [number for turn in turns for number in turn] == list(range(200)), "in the order of their calls"
    assert max(map(len, turns)) > 4
    assert len(turns) > 4


async def test_a_cancelled_task_keeps_no_other_waiting() -> None:
    spend(WHOLE_TURN)
    tasks = [asyncio.create_task(take_turn(WHOLE_TURN)) for _ in range(10)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    async with asyncio.timeout(10):
        await asyncio.wait(tasks)
    assert [task.cancelled() for task in tasks] == [True, False] * 5
    await take_turn(1)


def test_tasks_of_a_loop_that_has_ended_are_forgotten() -> None:
    async def leave() -> None:
        spend(WHOLE_TURN)
        task = asyncio.create_task(take_turn(WHOLE_TURN))
        await asyncio.sleep(0)
        assert not task.done()

    async def go_on() -> None:
        spend(WHOLE_TURN)
        async with asyncio.timeout(10):
            await take_turn(WHOLE_TURN)

    asyncio.run(leave())
    asyncio.run(go_on())


def test_tasks_of_a_loop_that_is_interrupted_by_another_one_go_on() -> None:
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def leave() -> list[asyncio.Task[None]]:
        spend(WHOLE_TURN)
        tasks = [asyncio.create_task(take_turn(WHOLE_TURN)) for _ in range(3)]
        await asyncio.sleep(0)
        return tasks

    async def go_on(tasks: list[asyncio.Task[None]]) -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks)

    tasks = first.run_until_complete(leave())
    others = second.run_until_complete(leave())
    first.run_until_complete(go_on(tasks))
    second.run_until_complete(go_on(others))
    first.close()
    second.close()


def test_a_turn_needs_an_event_loop() -> None:
    with pytest.raises(RuntimeError):
        take_turn(1).send(None)


def test_the_cost_of_copying_is_that_of_the_data_path() -> None:
    header = (ROOT / "aioverbs" / "_core" / "data_path" / "loop_budget.h").read_text()
    assert f"#define TURN_UNIT_BYTES {BYTES_PER_UNIT}\n" in header
