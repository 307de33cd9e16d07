"""Loops, interpreters and processes that end, or are interrupted, with work outstanding."""

import asyncio
import signal
import subprocess
import sys
import textwrap
import time
import warnings

import pytest

from aioverbs import BrokenResourceError, Device, ForkedProcessError, MessageModel, WorkCompletionError, open_device
from aioverbs._core.data_path.data_path import Message, Operation, Received
from aioverbs._verbs.receive_refill import Refiller
from tests.capabilities import Capability, needs
from tests.conftest import LOOP_FACTORIES, ROOT
from tests.core.children import in_child
from tests.data_path_endings.pair import PATIENCE_S, Pair, open_pair, pair_on, until
from tests.devices import MODES, name_of
from tests.garbage import collect_garbage
from tests.pace import patience
from tests.waiting import wait_until

every_model = pytest.mark.parametrize("model", MessageModel, ids=lambda model: model.name)
every_loop = pytest.mark.parametrize("loop_name", LOOP_FACTORIES)
every_mode = pytest.mark.parametrize("mode", MODES)


# ---- Loops that end


@every_loop
@every_mode
@every_model
def test_a_second_loop_closes_the_device_of_an_ended_loop(loop_name: str, mode: str, model: MessageModel) -> None:
    device = open_device(name_of(mode), execution="thread" if mode == "thread" else "inline")
    tasks: list[asyncio.Task[None]] = []
    operations: list[Operation[None]] = []
    pairs: list[Pair] = []

    async def wait(pair: Pair) -> None:
        await pair.write(64)

    async def begin() -> None:
        await device.open()
        pair = await open_pair(device, model, sends=4, receive_depth=4, receive_size=8)
        pairs.append(pair)
        pair.hold()
        operations.extend(pair.write(8 * each) for each in range(6))  # two of them wait for slots
        tasks.append(asyncio.create_task(wait(pair)))
        await asyncio.sleep(0)
        operations.append(pair.write(128))

    async def end() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            await asyncio.wait_for(device.aclose(), PATIENCE_S)

    for main in (begin, end):
        with asyncio.Runner(loop_factory=LOOP_FACTORIES[loop_name]) as runner:
            runner.run(main())
    assert device.closed
    assert tasks[0].cancelled()
    for operation in operations:
        with pytest.raises((BrokenResourceError, WorkCompletionError)):
            operation.result()
    (pair,) = pairs
    assert len(pair.source.pins) == len(pair.target.pins) == 0


# ---- The interpreter ends

PREAMBLE = f"""
import asyncio, gc, os, sys, warnings
sys.path.append({str(ROOT)!r})
warnings.simplefilter("ignore", ResourceWarning)
import uvloop
from aioverbs import MessageModel, open_device
from tests.data_path_endings.pair import open_pair, pair_on

references = []

async def busy(mode="thread", model=MessageModel.DEFAULT, hold=False):
    execution = "thread" if mode == "thread" else "inline"
    device = open_device("soft0", execution=execution, delay_ns=20_000_000 if mode == "thread" else 0)
    await device.open()
    pair = await open_pair(device, model, sends=8, receive_depth=8, receive_size=64)
    references.extend([device, pair])
    if hold:
        pair.hold()
    references.extend(pair.write(8 * each) for each in range(16))
    batch = pair.near.batch()
    batch.write(pair.source[:8], pair.target.remote()[:8])
    references.append(batch.post())
    return pair

async def wait(awaited):
    await awaited
"""

SCRIPTS = {
    "inline": "run(busy('inline', hold=True))",
    "chained": "run(busy(model=MessageModel.HIGH_BANDWIDTH))",
    "polled": "run(busy(model=MessageModel.FORCE_LOW_LATENCY))",
    "forgotten": """
        async def main():
            await busy()
            references.clear()
        run(main())
    """,
    "awaited by tasks": """
        async def main():
            pair = await busy(hold=True)
            references.extend(asyncio.create_task(wait(pair.write(8 * each))) for each in range(4))
            references.append(asyncio.create_task(wait(anext(pair.far.messages()))))
            await asyncio.sleep(0)
        run(main())
    """,
    "a loop that is never closed": """
        async def main():
            pair = await busy(hold=True)
            references.extend(asyncio.create_task(wait(pair.write(8 * each))) for each in range(4))
            await asyncio.sleep(0)
        loop = new_event_loop()
        loop.run_until_complete(main())
    """,
    "sys.exit in a task": """
        async def main():
            pair = await busy(hold=True)
            await asyncio.sleep(0)
            sys.exit(0)
        run(main())
    """,
    "in a cycle": """
        async def main():
            await busy(hold=True)
            gc.disable()  # collected while the loop runs, the requests would be flushed, and held, for 10 s
            references.append(references[:])
            references[-1].append(references[-1])
            references.clear()
        run(main())
    """,
    "shared by a thread": """
        import threading
        from aioverbs import ThreadModel
        def work():
            async def main():
                await busy(hold=True)
                await asyncio.sleep(3600)
            run(main())
        threading.Thread(target=work, daemon=True).start()
        import time
        while len(references) < 19:
            time.sleep(0.001)
    """,
}


@every_loop
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_the_interpreter_exits_silently(script: str, loop_name: str) -> None:
    loops = "uvloop.new_event_loop" if loop_name == "uvloop" else "asyncio.SelectorEventLoop"
    loop_source = textwrap.dedent(f"""
        def new_event_loop():
            loop = {loops}()
            loop.slow_callback_duration = 60
            return loop

        def run(main):
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                return runner.run(main)
    """)
    text = PREAMBLE + loop_source + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-P", "-X", "dev", "-W", "ignore", "-c", text],
        capture_output=True,
        text=True,
        timeout=patience(30),
    )
    # A coroutine that was never awaited, or a pending task that is destroyed, would be reported here, too.
    assert (done.returncode, done.stderr) == (0, "")


# ---- Signals


class Interrupted(BaseException):
    """An exception that the signal handler raises."""


@pytest.mark.parametrize("model", [MessageModel.LOW_LATENCY, MessageModel.FORCE_LOW_LATENCY], ids=["low", "force"])
@pytest.mark.every_way
async def test_a_spin_is_interrupted(device: Device, model: MessageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    spins = False

    def interrupt(*_: object) -> None:
        if spins:  # only while spinning
            raise Interrupted

    def spin() -> None:
        nonlocal spins
        spins = True
        operation.send(None)

    monkeypatch.setattr("aioverbs._verbs.completion_queue._SPIN_NS", int(PATIENCE_S * 1e9))
    async with pair_on(device, model) as pair:
        pair.hold()
        operation = pair.write()
        before = signal.signal(signal.SIGPROF, interrupt)
        signal.setitimer(signal.ITIMER_PROF, 0.02, 0.02)  # CPU time of the process: other processes may run meanwhile
        began = time.monotonic()
        try:
            with pytest.raises(Interrupted):
                spin()
        finally:
            spins = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, signal.SIG_IGN)  # discards a pending signal
            signal.signal(signal.SIGPROF, before)
        assert time.monotonic() - began < PATIENCE_S, "the spin was not interrupted"
        assert len(pair.source.pins) == 1
        pair.unhold()
        await asyncio.wait_for(operation, PATIENCE_S)  # can still be awaited
        assert pair.written() == b"12345678"
        await pair.check_idle()


@needs(Capability.FAULT_PLAN)
@pytest.mark.every_way
async def test_an_exception_in_one_completion_loses_no_other(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Refiller._message
    raised: list[Received] = []

    def interrupted(self: Refiller, received: Received) -> Message:
        if not raised:
            raised.append(received)
            raise Interrupted
        return make(self, received)

    monkeypatch.setattr(Refiller, "_message", interrupted)
    async with pair_on(device, receive_depth=4, receive_size=8) as pair:

        def drained() -> bool:
            pair.cq._cq_dispatcher.drain()
            return False

        device.faults.hold()
        sends = [pair.near.send(pair.source[:8]) for _ in range(3)]
        await until(lambda: device.faults.held() == 6)
        device.faults.unhold()
        with pytest.raises(Interrupted):
            wait_until(drained)
        await until(lambda: all(each.done() for each in sends))
        await until(lambda: pair.far.statistics().receives.completed == 3)


@every_loop
@pytest.mark.every_way
def test_keyboard_interrupt_ends_a_spin_and_loses_nothing(loop_name: str) -> None:
    loops = "uvloop.new_event_loop" if loop_name == "uvloop" else "asyncio.SelectorEventLoop"
    text = PREAMBLE + textwrap.dedent(f"""
        import signal, threading
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes begin without one
        async def main():
            device = open_device("soft0", execution="thread")
            async with device, pair_on(device, MessageModel.FORCE_LOW_LATENCY, spin_ns=300_000_000) as pair:
                pair.hold()
                write = pair.write()
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
                try:
                    await write
                finally:
                    assert len(pair.source.pins) == 1
                    pair.unhold()
                    while not write.done():
                        await asyncio.sleep(0)
                    assert pair.written() == b"12345678" and not len(pair.source.pins)
                    print("nothing was lost", flush=True)
        with asyncio.Runner(loop_factory={loops}) as runner:
            runner.run(main())
    """)
    done = subprocess.run([sys.executable, "-P", "-c", text], capture_output=True, text=True, timeout=patience(30))
    assert done.stdout == "nothing was lost\n"
    assert done.stderr.strip().endswith("KeyboardInterrupt")
    assert done.returncode == -signal.SIGINT


# ---- Fork


@every_model
async def test_a_forked_child_is_refused_and_the_parent_goes_on(device: Device, model: MessageModel) -> None:
    async with pair_on(device, model, sends=4, receive_depth=4, receive_size=8) as pair:
        pair.hold()
        operations = [pair.write(8 * each) for each in range(6)]
        waiting = asyncio.create_task(asyncio.wait_for(pair.write(64), PATIENCE_S))
        await asyncio.sleep(0)

        def refused() -> list[str]:
            outcomes = []
            for call in (operations[0].done, operations[5].done, pair.write, pair.near.batch().post):
                try:
                    call()
                except ForkedProcessError:
                    outcomes.append("refused")
                except Exception as error:
                    outcomes.append(repr(error))
            operations.clear()
            collect_garbage()
            return outcomes

        assert in_child(refused) == ["refused"] * 4
        pair.unhold()
        await asyncio.wait_for(asyncio.gather(*operations, waiting), PATIENCE_S)
        assert pair.written(0, 48) == b"12345678" * 6
        await pair.check_idle()
