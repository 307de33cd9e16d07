"""A model of the memory order of rings (soft/fabric/ring.h), explored exhaustively.

Each side is a program of few steps. A thread may execute its steps in any order that no barrier, no dependency and no
common variable forbids, as processors with a weak memory order and compilers do; memory itself has one value for each
variable. So a store that is executed after later loads stands for a store buffer, and a load that is executed before
earlier ones for speculation. All orders of all steps of both sides are explored. Each test also removes one barrier,
and expects that the model finds the error: a barrier whose removal goes unnoticed would be one that nothing tests.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import pytest

Kind = Literal["load", "store", "exchange", "fence", "ring", "drain", "sleep"]
Memory = Mapping[str, int]


@dataclass(frozen=True)
class Step:
    """A step of a program.

    :param variable: what a load, store or exchange accesses; the doorbell of ``ring``, ``drain``, which reads it, and
        ``sleep``, which waits for it and reads it.
    :param value: what is stored.
    :param result: name of the value that is loaded.
    :param condition: the step is skipped unless this earlier result has the given value, or that of another result.
    :param order: "acquire" or "release", or "" for none.
    """

    kind: Kind
    variable: str = ""
    value: int = 0
    result: str = ""
    condition: tuple[str, int | str] | None = None
    order: str = ""


def may_pass(later: Step, earlier: Step) -> bool:
    """Return whether `later` may be executed before `earlier` of the same program."""
    return not (
        "fence" in (later.kind, earlier.kind)
        or later.variable == earlier.variable
        or earlier.order == "acquire"
        or later.order == "release"
        or earlier.kind in ("drain", "sleep")  # system calls order what is before a ring, and what is behind a sleep
        or later.kind in ("ring", "drain", "sleep")
        or (later.condition is not None and earlier.result in later.condition)
    )


@dataclass(frozen=True)
class State:
    """State of an execution: memory, results, and the steps of each program that were executed."""

    memory: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, int], ...]
    done: tuple[frozenset[int], ...]


def is_due(step: Step, results: Memory) -> bool:
    """Return whether the condition of a step holds."""
    if step.condition is None:
        return True
    name, value = step.condition
    return results.get(name, 0) == (results.get(value, 0) if isinstance(value, str) else value)


def executed(state: State, thread: int, index: int, step: Step) -> State | None:
    """Return the state after a step; None if the step cannot be executed yet."""
    memory, results = dict(state.memory), dict(state.results)
    done = tuple(each | {index} if at == thread else each for at, each in enumerate(state.done))
    if is_due(step, results):
        before = memory.get(step.variable, 0)
        if step.kind == "sleep":
            if not before:
                return None
            memory[step.variable] = 0
        elif step.kind == "drain":
            memory[step.variable] = 0
        elif step.kind == "ring":
            memory[step.variable] = 1
        elif step.kind in ("store", "exchange"):
            memory[step.variable] = step.value
        if step.result:
            results[step.result] = before
    return State(tuple(sorted(memory.items())), tuple(sorted(results.items())), done)


def next_states(programs: tuple[tuple[Step, ...], ...], state: State) -> Iterator[State]:
    for thread, program in enumerate(programs):
        left = [index for index in range(len(program)) if index not in state.done[thread]]
        for at, index in enumerate(left):
            if all(may_pass(program[index], program[earlier]) for earlier in left[:at]):
                after = executed(state, thread, index, program[index])
                if after is not None:
                    yield after


def ends(*programs: tuple[Step, ...], memory: Memory | None = None) -> list[tuple[dict[str, int], bool]]:
    """Explore all executions; return the results of each end, and whether all programs were over."""
    start = State(tuple(sorted((memory or {}).items())), (), tuple(frozenset() for _ in programs))
    seen, stack, found = {start}, [start], []
    while stack:
        state = stack.pop()
        following = list(next_states(programs, state))
        if not following:
            over = all(len(done) == len(program) for done, program in zip(state.done, programs, strict=True))
            found.append((dict(state.results), over))
        stack += (new := set(following) - seen)
        seen |= new
    return found


def without(program: tuple[Step, ...], at: int) -> tuple[Step, ...]:
    """Return the program without the barrier of a step."""
    step = program[at]
    if step.kind == "fence":
        return program[:at] + program[at + 1 :]
    assert step.order
    return (*program[:at], replace(step, order=""), *program[at + 1 :])


# ---- Bytes and indices ---------------------------------------------------------------------------------------------

# One byte's place is used twice. The producer waits for the room of the second by looking again.
PRODUCER = (
    Step("store", "byte", 1),
    Step("store", "tail", 1, order="release"),
    Step("load", "head", result="room", order="acquire"),
    Step("store", "byte", 2, condition=("room", 1)),
)
CONSUMER = (
    Step("load", "tail", result="available", order="acquire"),
    Step("load", "byte", result="read"),
    Step("store", "head", 1, condition=("available", 1), order="release"),
)


def reads_wrong_bytes(producer: tuple[Step, ...], consumer: tuple[Step, ...]) -> bool:
    """Return whether the consumer may read a byte that was not written, or that was written over."""
    return any(results["available"] and results["read"] != 1 for results, _ in ends(producer, consumer))


def test_bytes_are_read_as_they_were_written() -> None:
    assert not reads_wrong_bytes(PRODUCER, CONSUMER)


def test_a_missing_barrier_of_an_index_is_found() -> None:
    assert reads_wrong_bytes(without(PRODUCER, 1), CONSUMER)
    assert reads_wrong_bytes(PRODUCER, without(CONSUMER, 0))
    assert reads_wrong_bytes(PRODUCER, without(CONSUMER, 2))


# ---- Sleeping ------------------------------------------------------------------------------------------------------


def notify(message: int) -> tuple[Step, ...]:
    """Return the steps of publishing an index, and of waking the other side if it wants that."""
    wants, taken = f"wants {message}", f"taken {message}"
    return (
        Step("store", "index", message, order="release"),
        Step("fence"),
        Step("load", "wants", result=wants),
        Step("exchange", "wants", 0, result=taken, condition=(wants, 1)),
        Step("ring", "bell", condition=(taken, 1)),
    )


def wait(message: int) -> tuple[Step, ...]:
    """Return the steps of sleeping until the index is not the one before `message` any more."""
    seen = f"seen {message}"
    return (
        Step("store", "wants", 1),
        Step("fence"),
        Step("load", "index", result=seen, order="acquire"),
        Step("sleep", "bell", condition=(seen, message - 1)),
    )


def sleeps_for_ever(waker: tuple[Step, ...], sleeper: tuple[Step, ...]) -> bool:
    return not all(over for _, over in ends(waker, sleeper))


def test_no_wake_up_is_lost() -> None:
    assert not sleeps_for_ever(notify(1), wait(1))
    assert not sleeps_for_ever(notify(1) + notify(2), wait(1))


@pytest.mark.parametrize("side", ["waker", "sleeper"])
def test_a_missing_fence_is_found(side: str) -> None:
    waker = without(notify(1), 1) if side == "waker" else notify(1)
    sleeper = without(wait(1), 1) if side == "sleeper" else wait(1)
    assert sleeps_for_ever(waker, sleeper)


def test_one_of_two_wakers_rings() -> None:
    """Two threads publish on one side, one bytes and the other room, and either takes both wishes away."""
    other = tuple(
        replace(
            step,
            variable="other index" if step.variable == "index" else step.variable,
            result=step.result and f"other {step.result}",
            condition=step.condition and (f"other {step.condition[0]}", step.condition[1]),
        )
        for step in notify(1)
    )
    found = ends(notify(1), other, wait(1))
    assert all(over for _, over in found)
    assert all(results.get("taken 1", 0) + results.get("other taken 1", 0) <= 1 for results, _ in found)


# ---- Room, for which a thread asks while another one sleeps --------------------------------------------------------

# One thread finds the ring full, asks for room, and leaves the rest to the thread that sleeps. That one sends what is
# left when it is woken, if it sees that the ring is full.
ASKING = (
    Step("store", "starved", 1),
    Step("store", "wants", 1),
    Step("fence"),
    Step("load", "index", result="room", order="acquire"),
)
SLEEPING = (
    Step("sleep", "bell"),
    Step("load", "starved", result="starved"),
)


def stays_full(asking: tuple[Step, ...], sleeping: tuple[Step, ...]) -> bool:
    """Return whether room may come that neither thread of the sender notices."""
    found = ends(asking, notify(1), sleeping)
    return any(not results["room"] and not (over and results["starved"]) for results, over in found)


def test_room_is_noticed_by_one_of_two_threads() -> None:
    assert not stays_full(ASKING, SLEEPING)


def test_a_full_ring_that_is_noted_too_late_is_found() -> None:
    noted_last = (*ASKING[1:], ASKING[0])
    assert stays_full(noted_last, SLEEPING)
    assert stays_full(without(ASKING, 2), SLEEPING)


# ---- One doorbell for an answer and a message ----------------------------------------------------------------------

# Ring "answer" is that of the served stream, ring "message" that of the link (soft/fabric/shared_rings.h). The peer
# waits for bytes in both.
ARMED = {"wants answer": 1, "wants message": 1}

# One thread answers, owes the doorbell, and pays later.
OWING = (
    Step("store", "answer", 1, order="release"),
    Step("fence"),
    Step("load", "count", result="owed at"),
    Step("load", "count", result="count"),
    Step("load", "wants answer", result="unpaid", condition=("count", "owed at")),
    Step("exchange", "wants answer", 0, result="taken", condition=("unpaid", 1)),
    Step("ring", "bell", condition=("taken", 1)),
)
# Another one, or the same one, sends a message.
SENDING = (
    Step("store", "message", 1, order="release"),
    Step("fence"),
    Step("load", "wants message", result="wanted"),
    Step("exchange", "wants message", 0, result="counted", condition=("wanted", 1)),
    Step("store", "count", 1, condition=("counted", 1)),
    Step("ring", "bell", condition=("counted", 1)),
)
# Whichever doorbell wakes the peer, it looks whether there is an answer. If not, the stream of the answer is still
# armed, and the peer sleeps again.
LOOKING = (
    Step("sleep", "bell", condition=("answer", 0)),
    Step("load", "answer", result="answer", condition=("answer", 0)),
)
ASLEEP = LOOKING + LOOKING[:1]
# A peer that is awake sees the message first, and reads its doorbell before it sleeps, if that has come by then.
AWAKE = (
    Step("load", "message", result="message", order="acquire"),
    Step("exchange", "wants message", 0, condition=("message", 1)),
    Step("drain", "bell", result="drained", condition=("message", 1)),
    Step("load", "answer", result="answer", condition=("drained", 1)),
    Step("store", "wants message", 1),
    Step("fence"),
    *ASLEEP,
)


def misses_answer(
    owing: tuple[Step, ...] = OWING, sending: tuple[Step, ...] = SENDING, peer: tuple[Step, ...] = ASLEEP
) -> bool:
    """Return whether the peer may sleep for ever, although there is an answer."""
    return not all(over for _, over in ends(owing, sending, peer, memory=ARMED))


@pytest.mark.parametrize("peer", [ASLEEP, AWAKE], ids=["asleep", "awake"])
def test_a_message_pays_for_an_answer(peer: tuple[Step, ...]) -> None:
    assert not misses_answer(peer=peer)
    one_doorbell = [results for results, _ in ends(OWING[:3] + SENDING + OWING[3:], peer, memory=ARMED)]
    assert all(not results.get("taken") for results in one_doorbell if results.get("counted"))
    assert any(results.get("counted") for results in one_doorbell)


def test_an_answer_pays_for_itself_without_a_message() -> None:
    assert not misses_answer(sending=())


def test_a_missing_step_between_answer_and_message_is_found() -> None:
    assert misses_answer(owing=without(OWING, 1))
    counted_last = (*SENDING[:4], SENDING[5], SENDING[4])
    assert misses_answer(sending=counted_last)
    assert misses_answer(peer=tuple(step for step in AWAKE if step.condition != ("drained", 1)))
