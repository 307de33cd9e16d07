"""Calls to another loop end, whatever happens to that loop and to the waiting task."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable

import anyio
import pytest

from aioverbs import AffinityError, BrokenResourceError
from aioverbs._lifecycle import affinity
from aioverbs._lifecycle.affinity import Affinity, _lost, run_on_owner, run_on_owner_within, wait_uncancelled
from aioverbs._lifecycle.cross_loop import CrossLoopCall
from tests.data_path_endings.pair import until
from tests.garbage import collect_garbage
from tests.manager.test_domains import OwnerThread
from tests.pace import patience


async def stalled_loop() -> tuple[asyncio.AbstractEventLoop, Affinity]:
    """Return a loop that has stopped but is not closed, with its affinity; its thread is alive."""
    loop = asyncio.new_event_loop()

    async def make() -> Affinity:
        return Affinity.of_running_loop()

    return loop, await asyncio.to_thread(loop.run_until_complete, make())


@pytest.mark.parametrize("kind", ["native", "anyio"])
async def test_a_call_cancelled_before_it_starts_ends(kind: str) -> None:
    called: list[int] = []
    go_on = threading.Event()

    async def withdraw(cancel: Callable[[], object]) -> None:
        cancel()
        await asyncio.sleep(0.01)  # the call is withdrawn one iteration later
        go_on.set()

    with OwnerThread() as elsewhere:
        elsewhere.loop.call_soon_threadsafe(go_on.wait, patience(10))  # later callbacks run in one iteration
        async with asyncio.timeout(patience(5)):
            if kind == "anyio":
                with anyio.CancelScope() as scope:
                    withdrawing = asyncio.create_task(withdraw(scope.cancel))
                    await run_on_owner(elsewhere.owner, called.append, 1)
                assert scope.cancelled_caught
            else:
                task = asyncio.create_task(run_on_owner(elsewhere.owner, called.append, 1))
                withdrawing = asyncio.create_task(withdraw(task.cancel))
                with pytest.raises(asyncio.CancelledError):
                    await task
            await withdrawing
    assert called == []


async def test_a_call_to_a_stalled_loop_can_be_cancelled() -> None:
    loop, owner = await stalled_loop()
    called: list[int] = []
    async with asyncio.timeout(patience(5)):
        with anyio.move_on_after(0.01) as scope:
            await run_on_owner(owner, called.append, 1)
    assert scope.cancelled_caught
    await asyncio.to_thread(loop.run_until_complete, asyncio.sleep(0))
    assert called == [], "the call was withdrawn"
    loop.close()


async def test_a_cancelled_call_to_a_blocked_loop_is_given_up() -> None:
    called: list[int] = []
    go_on = threading.Event()
    with OwnerThread() as elsewhere:
        elsewhere.loop.call_soon_threadsafe(go_on.wait, patience(10))
        task = asyncio.create_task(run_on_owner_within(0.05, elsewhere.owner, lambda: called.append(1)))
        await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(patience(5)):
            with pytest.raises(TimeoutError, match=r"did not begin a call within 0\.05 s"):
                await task
        go_on.set()
        await run_on_owner(elsewhere.owner, lambda: None)
    assert called == []


async def test_a_call_fails_when_its_owner_is_replaced() -> None:
    loop, owner = await stalled_loop()
    task = asyncio.create_task(run_on_owner(owner, lambda: None))
    await asyncio.sleep(0.01)
    loop.close()
    owner.take_over()
    async with asyncio.timeout(patience(5)):
        with pytest.raises(AffinityError, match="has ended, and the call"):
            await task


async def test_a_result_sent_before_the_owner_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result also counts if this loop notices the end of the owner before it processes the result."""

    async def stay() -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)
        return "came back"

    with OwnerThread() as elsewhere:

        def lost(owner: Affinity, call: CrossLoopCall[object]) -> BaseException | None:
            elsewhere.stop()  # asyncio.run cancels the remaining tasks
            elsewhere.thread.join()
            return _lost(owner, call)

        monkeypatch.setattr(affinity, "_lost", lost)
        assert await run_on_owner(elsewhere.owner, stay) == "came back"


async def test_wait_uncancelled_waits_through_cancellations() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(wait_uncancelled(future))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    future.set_result(1)
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.every_way
async def test_wait_uncancelled_begins_its_coroutine_although_all_tasks_are_cancelled() -> None:
    """The end of a loop cancels all tasks, including one that has not had its first step."""
    ended: list[bool] = []

    async def work() -> None:
        await asyncio.sleep(0)
        ended.append(True)

    waiting = asyncio.create_task(wait_uncancelled(work()))
    await asyncio.sleep(0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == [True]


@pytest.mark.every_way
@pytest.mark.parametrize("all_tasks", [True, False])
async def test_wait_uncancelled_reports_that_its_coroutine_was_cancelled(all_tasks: bool) -> None:
    """Unlike a cancellation of the caller alone, this means that the work is not complete."""
    waiting = asyncio.create_task(wait_uncancelled(asyncio.sleep(60)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the coroutine has begun
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        if all_tasks or task is not waiting:
            task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await waiting
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)


def test_calls_without_asyncio_raise() -> None:
    async def call() -> None:
        await run_on_owner(owner, print)

    loop = asyncio.new_event_loop()

    async def make() -> Affinity:
        return Affinity.of_running_loop()

    owner = loop.run_until_complete(make())
    coroutine = call()
    with pytest.raises(RuntimeError, match="aioverbs needs an asyncio event loop, and none is running here"):
        coroutine.send(None)
    loop.close()


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_call_that_raises_system_exit_is_an_error(asynchronous: bool) -> None:
    """A SystemExit on the owner's loop does not exit the caller's loop."""

    async def leave() -> None:
        raise SystemExit(3)

    loop, owner = await stalled_loop()

    def run() -> int | str | None:
        with pytest.raises(SystemExit) as caught:
            loop.run_forever()
        return caught.value.code

    running = asyncio.create_task(asyncio.to_thread(run))
    async with asyncio.timeout(patience(5)):
        with pytest.raises(BrokenResourceError, match=r"<Affinity of .* was ended by .*: SystemExit\(3\)"):
            await run_on_owner(owner, leave if asynchronous else lambda: exit(3))
        assert await running == 3
    await asyncio.to_thread(loop.close)


async def test_an_error_after_cancellation_is_raised() -> None:
    started = threading.Event()

    async def stay() -> None:
        started.set()
        try:
            await asyncio.sleep(30)
        finally:
            raise ZeroDivisionError("on its way out")

    with OwnerThread() as elsewhere:
        task = asyncio.create_task(run_on_owner(elsewhere.owner, stay))
        await asyncio.to_thread(started.wait, 30)
        task.cancel()
        with pytest.raises(ZeroDivisionError, match="on its way out"):
            await task


async def test_exceptions_of_calls_are_collected_soon() -> None:
    class Failed(Exception):
        pass

    def fail() -> None:
        raise Failed

    collect_garbage()
    gc.disable()
    try:
        with OwnerThread() as elsewhere:
            with pytest.raises(Failed) as caught:
                await run_on_owner(elsewhere.owner, fail)
            last = weakref.ref(caught.value)
            del caught
            await until(lambda: last() is None)  # loops may still reference their last callback
    finally:
        gc.enable()
