"""Every public member of objects that a loop owns refuses every wrong caller at once, without changing any state.

Introspection of the public names finds the rows, so that a member added without a check fails this test. Each call runs
for a number of loop iterations, not for a time.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

import aioverbs
from aioverbs import (
    AffinityError,
    BusyResourceError,
    ClosedResourceError,
    Device,
    Operation,
    QpState,
    QueuePair,
    ResourceState,
    VerbsError,
    rdma_cm,
)
from tests.conftest import LOOP_FACTORIES
from tests.core.children import in_child
from tests.manager import affinity_members
from tests.manager.affinity_checks import check_all_work
from tests.manager.affinity_objects import DOMAINS, Factory, OwnedObjects, owned_objects
from tests.pace import patience

pytestmark = pytest.mark.timeout(180)

# Lower bound of calls by each caller, on open objects and again on closed ones; a little less than the present number.
# Raise it when public names are added. If the number falls, members are no longer called.
LEAST_ROWS = {"SINGLE": 1450, "UNSAFE": 330, "SAFE": 330, "PD": 330}
TURNS = 25  # loop iterations after which an unfinished call counts as waiting

# Other exceptions that may refuse a call, by class.
OTHER_REFUSALS: dict[str, type[BaseException]] = {
    "Batch": RuntimeError,  # posted twice
    "Connecting": RuntimeError,  # in a block already, or in none
    "Device": BusyResourceError,  # any loop may close it, unless it has children of another loop
    "Operation": RuntimeError,  # awaited twice, like a coroutine
    "ProtectionDomain": BusyResourceError,
}
# Errors that the owner gets as well: the requested object or state does not exist.
PLAIN_ERRORS = (ClosedResourceError, LookupError, ValueError, VerbsError, asyncio.InvalidStateError)
ENDS_OF_BLOCKS = ("__aexit__", "__exit__")
# Members that do nothing to an object that is unopened, closed, or belongs to the parent process.
NO_OPS_WHEN_CLOSED = (
    "__aexit__",
    "__exit__",
    "abort",
    "aclose",
    "close",
    "drain",
    "release",
    "revoke",
    "stop",
    "wait_closed",
)
# Classes that any caller may use, but not close if they have children of another loop: only closing is called.
PARENTS = ("Device", "ProtectionDomain")


@dataclass
class Table:
    """Results of all calls.

    :param wrong: calls with a wrong result, by kind of error.
    """

    rows: int = 0
    callers: int = 0
    wrong: dict[str, list[str]] = field(default_factory=lambda: {"let in": [], "hanging": [], "touched": []})

    def add(self, other: "Table") -> None:
        """Add the results of another caller."""
        self.rows += other.rows
        self.callers += other.callers
        for what, rows in other.wrong.items():
            self.wrong[what] += rows

    def __str__(self) -> str:
        counts = ", ".join(f"{len(rows)} {what}" for what, rows in self.wrong.items())
        return f"{self.rows:,} rows, {counts}"

    def check(self) -> None:
        """Fail the test if a call had a wrong result."""
        lines = [f"{what}: {row}" for what, rows in self.wrong.items() for row in rows]
        if lines:
            pytest.fail("\n".join([str(self), *lines]), pytrace=False)


class _Hanging(Exception):
    """A call is suspended instead of refused."""


@dataclass
class _AwaitableIterator:
    """Awaitable for an iterator returned by `__await__`."""

    iterator: Any

    def __await__(self) -> Any:
        return self.iterator


def _kind(subject: object) -> str:
    return type(subject).__name__


def _is_for_any_caller(subject: object, name: str) -> bool:
    return (
        any(f"{base.__name__}.{name}" in affinity_members.ANY_CALLER for base in type(subject).__mro__)
        or name in affinity_members.ANY_CALLER
    )


def _call_member(subject: object, name: str, owned: OwnedObjects) -> object:
    """Get an attribute or call a method; return the result, which may be awaitable."""
    static = inspect.getattr_static(type(subject), name, None)
    if static is None or not inspect.isroutine(static):
        return getattr(subject, name)
    arguments = affinity_members.arguments(type(subject), name, owned)
    if name.startswith("__"):  # looked up on the class, as the interpreter does
        return getattr(type(subject), name)(subject, *arguments)
    return getattr(subject, name)(*arguments)


def _awaitable(subject: object, name: str, result: object) -> Any:
    """Return the awaitable in the result of a call, or None."""
    if name == "__await__":
        return _AwaitableIterator(result)
    if isinstance(result, Operation):  # already posted
        return None
    return result if inspect.isawaitable(result) else None


async def _call_and_await(subject: object, name: str, owned: OwnedObjects) -> object:
    """Get an attribute or call a method, and await the result if it is awaitable."""
    result = _call_member(subject, name, owned)
    if name in ("__aiter__", "__iter__"):
        assert result is subject, "it returns another iterator: add one that is in use to `owned_objects`"
    awaitable = _awaitable(subject, name, result)
    return await awaitable if awaitable is not None else result


async def _await_for_some_turns(call: Coroutine[Any, Any, object]) -> object:
    """Await a call on the running loop for at most `TURNS` iterations.

    :raises _Hanging: the call did not finish.
    """
    task = asyncio.ensure_future(call)
    for _ in range(TURNS):
        await asyncio.sleep(0)
        if task.done():
            return task.result()
    task.cancel()
    for _ in range(TURNS):
        await asyncio.sleep(0)
    raise _Hanging


def _run_until_first_await(call: Coroutine[Any, Any, object]) -> object:
    """Run a call up to its first suspension, without a running loop.

    :raises _Hanging: the call suspended.
    """
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    call.close()
    raise _Hanging


class _Caller:
    """Caller that uses every member of every object from the wrong place.

    :param finished: True if the objects are closed.
    :param child: True if this is the child of a fork.
    """

    def __init__(self, name: str, owned: OwnedObjects, *, finished: bool, child: bool = False) -> None:
        self._name = name
        self._owned = owned
        self._is_finished = finished or child
        self._before = None if self._is_finished else owned.fingerprint()
        self._table = Table(callers=1)

    def _rows(self) -> Iterator[tuple[str, Any, str]]:
        """Yield label, object and member name for each call.

        The end of a block is called twice: without and with an error of the block.
        """
        left_out = {*affinity_members.ANY_CALLER_SIDE_EFFECTS}
        if self._owned.connection_domain is not self._owned.domain:
            left_out |= {*affinity_members.ANY_CALLER_ON_SHARED_DOMAINS}
        for label, known in self._owned.subjects.items():
            subject = known() if isinstance(known, Factory) else known
            names = affinity_members.members(subject)
            if _kind(subject) in PARENTS:
                names = iter(() if self._is_finished else ("aclose", "__aexit__"))
            for name in names:
                for error in (None, ValueError("of the block")) if name in ENDS_OF_BLOCKS else (None,):
                    self._owned.block_error = error
                    if f"{_kind(subject)}.{name}" not in left_out:
                        yield label, known() if isinstance(known, Factory) else subject, name

    async def on_a_loop(self) -> Table:
        """Make all calls on a running loop."""
        for label, subject, name in self._rows():
            try:
                result = await _await_for_some_turns(_call_and_await(subject, name, self._owned))
            except BaseException as error:
                self._record(label, subject, name, error)
            else:
                self._record(label, subject, name, None, f"gave {result!r}")
        return self._table

    def without_a_loop(self) -> Table:
        """Make all calls without a running loop."""
        for label, subject, name in self._rows():
            try:
                result = _run_until_first_await(_call_and_await(subject, name, self._owned))
            except BaseException as error:
                self._record(label, subject, name, error)
            else:
                self._record(label, subject, name, None, f"gave {result!r}")
        return self._table

    def _record(self, label: str, subject: object, name: str, error: BaseException | None, gave: str = "") -> None:
        block_error, wrong = self._owned.block_error, self._table.wrong
        row = (
            f"{_kind(subject)}.{name} of {label}{' with an error' if block_error is not None else ''}, by {self._name}"
        )
        self._table.rows += 1
        if error is None:
            error = _refusal_in_notes(block_error)
        if isinstance(error, _Hanging):
            wrong["hanging"].append(row)
        elif not self._is_expected(subject, name, error):
            wrong["let in"].append(f"{row}: {gave or repr(error)}")
        if self._before is not None and (after := self._owned.fingerprint()) != self._before:
            changes = [
                f"{key}: {self._before[key]} became {after[key]}" for key in after if after[key] != self._before[key]
            ]
            wrong["touched"].append(f"{row}: {'; '.join(changes)}")
            self._before = after

    def _is_expected(self, subject: object, name: str, error: BaseException | None) -> bool:
        if isinstance(error, (AffinityError, OTHER_REFUSALS.get(_kind(subject), AffinityError))):
            return True
        if _is_for_any_caller(subject, name):
            return error is None or isinstance(error, PLAIN_ERRORS)
        if name in ("__aenter__", "open") and isinstance(error, ClosedResourceError | RuntimeError):
            return True  # opened already, or there is no loop
        if not (self._is_finished or _is_idle(subject)):
            return False
        if isinstance(error, ValueError):
            return name == "throw"  # the exception passed to `throw`
        return isinstance(error, ClosedResourceError | StopAsyncIteration) or (
            error is None and name in NO_OPS_WHEN_CLOSED
        )


def _refusal_in_notes(error: BaseException | None) -> BaseException | None:
    """Return the refusal that `__aexit__` added as a note to the error of the block, or None."""
    for note in getattr(error, "__notes__", ()):
        for kind in (AffinityError, BusyResourceError, ClosedResourceError):
            if f" failed: {kind.__name__}: " in note:
                return kind(note)
    return None


def _is_idle(subject: object) -> bool:
    """Return whether an object is unopened or ended."""
    return getattr(subject, "state", None) is ResourceState.NEW or bool(getattr(subject, "ended", False))


def _run_in_thread(loop: asyncio.AbstractEventLoop, call: Callable[[], Table]) -> Table:
    """Run `call` in another thread while the owner's loop runs."""

    async def wait() -> Table:
        async with asyncio.timeout(patience(50)):
            return await asyncio.to_thread(call)

    return loop.run_until_complete(wait())


def _all_callers(owned: OwnedObjects, loop: asyncio.AbstractEventLoop, *, finished: bool) -> Table:
    def on_another_loop(name: str, factory: Callable[[], asyncio.AbstractEventLoop], child: bool = False) -> Table:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(_Caller(name, owned, finished=finished, child=child).on_a_loop())

    def without_a_loop(name: str) -> Table:
        return _Caller(name, owned, finished=finished).without_a_loop()

    async def forked() -> Table:
        return in_child(lambda: on_another_loop("the child of a fork", asyncio.SelectorEventLoop, child=True))

    table = Table()
    for name, factory in LOOP_FACTORIES.items():
        caller = partial(on_another_loop, f"another thread, with a loop of {name}", factory)
        table.add(_run_in_thread(loop, caller))
        table.add(on_another_loop(f"the owner's thread, with another loop of {name}", factory))
    table.add(_run_in_thread(loop, lambda: without_a_loop("another thread, without a loop")))
    table.add(without_a_loop("the owner's thread, without a loop"))
    before = None if finished else owned.fingerprint()
    table.add(loop.run_until_complete(forked()))
    if before is not None and owned.fingerprint() != before:
        table.wrong["touched"].append("something, by the child of a fork")
    return table


def _check_completeness(owned: OwnedObjects) -> None:
    """Check that the table has every public class, and every class that members return."""
    known = [each() if isinstance(each, Factory) else each for each in owned.subjects.values()]
    bases = {base for each in known for base in type(each).__mro__}
    found = {
        kind: f"{module.__name__}.{name}"
        for module in (aioverbs, rdma_cm)
        for name in module.__all__
        if isinstance(kind := getattr(module, name), type)
    }
    for kind in {type(each) for each in known}:
        found |= {given: f"returned by {kind.__name__}.{name}" for name, given in affinity_members.returned_kinds(kind)}
    missing = [
        f"{kind.__name__}, {where}"
        for kind, where in found.items()
        if kind not in bases
        and kind.__name__ not in affinity_members.ANY_CALLER_CLASSES
        and not affinity_members.is_value(kind)
    ]
    assert not missing, (
        "make one in tests/manager/affinity_objects.py, or state in `ANY_CALLER_CLASSES` of affinity_members.py "
        f"why any caller may use it: {'; '.join(missing)}"
    )
    names = {name for each in known for name in dir(each)} | {kind.__name__ for kind in found}
    names |= {f"{base.__name__}.{name}" for base in bases for name in dir(base)}
    excepted = (
        affinity_members.ANY_CALLER,
        affinity_members.ANY_CALLER_ON_SHARED_DOMAINS,
        affinity_members.ANY_CALLER_CLASSES,
        affinity_members.ANY_CALLER_SIDE_EFFECTS,
    )
    unknown = {name for each in excepted for name in each} - names
    assert not unknown, f"names that do not exist any more: {sorted(unknown)}"


@pytest.mark.parametrize("place", DOMAINS)
def test_wrong_callers_are_refused(place: str, record_property: Callable[[str, object], None]) -> None:
    loop, block = asyncio.SelectorEventLoop(), owned_objects(place)
    try:
        owned = loop.run_until_complete(block.__aenter__())
        try:
            if owned.connection_domain is owned.domain:
                _check_completeness(owned)
            table = _all_callers(owned, loop, finished=False)
            table.check()
            loop.run_until_complete(check_all_work(owned))
        finally:
            loop.run_until_complete(block.__aexit__(None, None, None))
        table.add(_all_callers(owned, loop, finished=True))
    finally:
        loop.close()
    table.check()
    record_property("summary", str(table))
    assert table.rows > LEAST_ROWS[place] * table.callers


async def test_the_owner_of_a_completion_queue_owns_its_queue_pairs(device: Device) -> None:
    async with (
        device.protection_domain() as pd,
        device.resource_domain(pd) as domain,
        domain.completion_queue(64) as cq,
        pd.completion_queue(64) as shared_cq,
        pd.queue_pair(cq) as sends,
        pd.queue_pair(shared_cq, cq) as receives,
    ):
        for qp in (sends, receives):
            assert qp.owner is domain.owner is cq.owner
            qp.to_init()

            async def elsewhere(qp: QueuePair = qp) -> None:
                for change in (qp.to_error, qp.to_reset):
                    with pytest.raises(AffinityError, match="which belongs to thread"):
                        change()
                with pytest.raises(AffinityError, match="which belongs to thread"):
                    await qp.aclose()

            await asyncio.to_thread(asyncio.run, elsewhere())
            assert qp.query().qp_state is QpState.INIT
