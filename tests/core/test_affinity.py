"""Calls from other threads than the owner's are refused before the verb, without any change; so are overlapping calls.

A thread domain's objects may be touched by one thread only: "objects … disable internal locking" (ibv_alloc_td), and a
resource domain's thread model SINGLE is "from only one thread over the lifetime of the object".
"""

import asyncio
import concurrent.futures
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from aioverbs import AffinityError, ClosedResourceError, ConcurrentAccessError, ForkedProcessError
from aioverbs._core.handles import handles, parent_domain
from tests.conftest import LOOP_FACTORIES
from tests.core.allocators import Recording
from tests.core.children import in_child
from tests.core.contexts import opened
from tests.core.family import Family, make_all
from tests.core.test_handles_closed import IDENTITY, access, public
from tests.garbage import collect_garbage

# Names that call no verb: constants of the object. A parent domain shares nothing by itself.
CONSTANTS = {"cqe", "fileno", "handle", "qp_num"}


@contextmanager
def open_family() -> Iterator[Family]:
    """Open one of each handle; those on the thread domain or the channel belong to the running loop."""
    owner = handles.Affinity.of_running_loop()
    with opened("inline") as context:
        members: Family = {
            "td": parent_domain.ThreadDomain(context, affinity=owner),
            "channel": handles.CompletionChannel(context, affinity=owner),
        }
        for handle in make_all(context, members).values():
            assert handle.affinity in (owner, None)
        yield members


def bound(family: Family) -> list[handles.Handle]:
    return [handle for handle in family.values() if handle.affinity is not None]


def verbs(handle: handles.Handle) -> list[str]:
    """Return the names of methods and properties that call verbs on a handle."""
    return sorted({*public(handle), "destroy"} - (IDENTITY - {"destroy"}) - CONSTANTS)


def count_refusals(family: Family, expected: type[BaseException], match: str) -> int:
    """Check that each call of a verb raises `expected`, and return the number of calls."""
    refusals = 0
    for handle in bound(family):
        for name in verbs(handle):
            with pytest.raises(expected, match=match) as caught:
                access(handle, name)
            assert repr(handle) in str(caught.value)
            refusals += 1
    return refusals


def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in another thread; return its result, or raise its exception."""
    with concurrent.futures.ThreadPoolExecutor(1, "another") as executor:
        return executor.submit(function).result(timeout=30)


def in_loop(function: Callable[[], Any], factory: Callable[[], asyncio.AbstractEventLoop]) -> Any:
    """Call a function in this thread with a new event loop running."""

    async def call() -> Any:
        return function()

    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(call())


@pytest.fixture(params=LOOP_FACTORIES)
def factory(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    return LOOP_FACTORIES[request.param]


def check_untouched(family: Family) -> None:
    """Check that the owner finds everything unchanged and working."""
    assert not any(handle.closed for handle in family.values())
    for handle in bound(family):
        owner = handle.affinity
        assert owner is not None
        assert owner.owns()
        owner.check(handle, "ibv_query")
    queue, qp = family["extended queue"], family["qp of a parent domain"]
    assert isinstance(queue, handles.CompletionQueue)
    assert isinstance(qp, handles.QueuePair)
    queue.resize(4)
    assert qp.query().qp_state == 0


# ---- Wrong callers


def test_another_thread_without_a_loop_is_refused(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    def body() -> None:
        with open_family() as family:
            wrong = "belongs to thread .* was called from thread 'another_0' with no event loop running: call it on the"
            assert in_thread(lambda: count_refusals(family, AffinityError, wrong)) > 30
            check_untouched(family)

    in_loop(body, factory)


def test_another_thread_with_a_loop_is_refused(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    def body() -> None:
        with open_family() as family:
            wrong = "was called from thread 'another_0' with event loop .* running: call it on the owning loop"
            assert in_thread(lambda: in_loop(lambda: count_refusals(family, AffinityError, wrong), factory)) > 30
            check_untouched(family)

    in_loop(body, factory)


async def test_the_executor_of_the_loop_is_refused() -> None:
    with open_family() as family:
        assert await asyncio.to_thread(count_refusals, family, AffinityError, "with no event loop running") > 30
        check_untouched(family)


def test_the_owning_thread_without_its_loop_is_refused(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    loop = factory()

    async def call(function: Callable[..., Any], *arguments: object) -> Any:
        return function(*arguments)

    family_of_loop = open_family()
    family = loop.run_until_complete(call(family_of_loop.__enter__))
    try:
        assert count_refusals(family, AffinityError, "was called from its own thread with no event loop running") > 30
        wrong = "was called from its own thread with event loop .* running"
        assert in_loop(lambda: count_refusals(family, AffinityError, wrong), factory) > 30
        # A later run of the same loop is the owner.
        loop.run_until_complete(call(check_untouched, family))
    finally:
        loop.run_until_complete(call(family_of_loop.__exit__, None, None, None))
        loop.close()


def test_an_object_of_a_closed_loop_can_be_taken_over(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    loop = factory()

    async def make() -> parent_domain.ThreadDomain:
        return parent_domain.ThreadDomain(context, affinity=handles.Affinity.of_running_loop())

    with opened("inline") as context:
        td = loop.run_until_complete(make())
        owner = td.affinity
        assert owner is not None
        orphaned = [owner.orphaned]
        loop.close()
        orphaned.append(owner.orphaned)
        assert orphaned == [False, True]

        def wrong() -> None:
            with pytest.raises(AffinityError, match="the loop that owns this object is closed"):
                td.destroy()
            assert owner is not None
            owner.take_over()
            td.destroy()

        in_loop(wrong, factory)
        assert td.closed


async def test_an_object_of_an_ended_thread_can_be_taken_over() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def make() -> handles.Affinity:
        loops.append(asyncio.get_running_loop())
        return handles.Affinity.of_running_loop()

    def thread() -> handles.Affinity:
        loop = asyncio.new_event_loop()
        return loop.run_until_complete(make())

    owners = [await asyncio.to_thread(in_thread, thread) for _ in range(50)]
    assert all(owner.orphaned for owner in owners), "a joined thread counts as living"
    owner = owners[0]
    assert not owner.owns()
    with pytest.raises(AffinityError, match="the thread that owns this object has ended"):
        owner.check(owner, "ibv_poll_cq")
    owner.take_over()
    assert owner.owns()
    assert not owner.orphaned
    with pytest.raises(AffinityError, match="still has an owner"):
        owner.take_over()
    for loop in loops:
        loop.close()


async def test_a_child_of_a_fork() -> None:
    with open_family() as family:
        assert in_child(lambda: refused_in_child(family)) > 30
        check_untouched(family)


def refused_in_child(family: Family) -> int:
    refusals = 0
    for handle in bound(family):
        assert handle.affinity is not None
        assert not handle.affinity.owns()
        with pytest.raises(ForkedProcessError):
            handle.affinity.check(handle, "ibv_poll_cq")
        for name in set(verbs(handle)) - {"destroy"}:
            with pytest.raises(ForkedProcessError, match="was opened before the fork"):
                access(handle, name)
            refusals += 1
        handle.destroy()  # does nothing: the handle belongs to the parent
    return refusals


# ---- Right callers


async def test_any_task_of_the_owner_is_accepted() -> None:
    async def use() -> None:
        check_untouched(family)

    with open_family() as family:
        await asyncio.gather(use(), use(), asyncio.create_task(use()))
        done = asyncio.Event()

        def callback() -> None:
            check_untouched(family)
            done.set()

        asyncio.get_running_loop().call_soon(callback)
        await done.wait()


async def test_children_belong_to_the_owner_of_their_parents() -> None:
    with opened("inline") as context:
        pd, owner = handles.ProtectionDomain(context), handles.Affinity.of_running_loop()
        domain = parent_domain.ParentDomain(pd, affinity=owner)
        owned, unbound = handles.CompletionQueue(context, 4, parent_domain=domain), handles.CompletionQueue(context, 4)
        assert owned.affinity is owner
        assert unbound.affinity is None
        assert handles.QueuePair(pd, unbound, owned).affinity is owner
        assert handles.QueuePair(pd, unbound, unbound).affinity is None
        another = handles.Affinity.of_running_loop()
        # Two domains of one loop have one owner.
        assert handles.QueuePair(domain, owned, handles.CompletionQueue(context, 4, affinity=another)).affinity is owner
        owned_by_other = handles.CompletionQueue(context, 4, affinity=handles.Affinity.unbound())
        for first, second in ((owned, owned_by_other), (owned_by_other, owned)):
            with pytest.raises(ValueError, match=r"belongs to <Affinity of .*, another argument to <Affinity of"):
                handles.QueuePair(pd, first, second)
        with pytest.raises(ValueError, match="belongs to <Affinity of thread"):
            parent_domain.ParentDomain(pd, parent_domain.ThreadDomain(context, affinity=owner), affinity=another)


async def test_other_threads_cannot_create_children() -> None:
    with open_family() as family:
        pd, domain, queue = family["pd"], family["domain"], family["queue"]
        assert isinstance(pd, handles.ProtectionDomain)
        assert isinstance(domain, parent_domain.ParentDomain)
        assert isinstance(queue, handles.CompletionQueue)

        def wrong() -> int:
            makers: list[Callable[[], handles.Handle]] = [
                lambda: handles.CompletionQueue(domain.context, 4, parent_domain=domain),
                lambda: handles.SharedReceiveQueue(domain, 4),
                lambda: handles.QueuePair(domain, queue, queue),
                lambda: handles.QueuePair(pd, queue, queue),
                lambda: parent_domain.ParentDomain(pd, domain.td),
                lambda: handles.CompletionChannel(domain.context, affinity=domain.affinity),
                lambda: parent_domain.ThreadDomain(domain.context, affinity=domain.affinity),
            ]
            for make in makers:
                with pytest.raises(AffinityError, match=r"ibv_(create|alloc)_"):
                    make()
            return len(makers)

        before = handles.open_handles()
        assert await asyncio.to_thread(wrong) == 7
        assert handles.open_handles() == before
        # A region belongs to no thread, whatever domain it is registered on.
        await asyncio.to_thread(lambda: handles.MemoryRegion(domain, bytearray(8)).destroy())


async def test_closed_handles_raise_closed_errors() -> None:
    with opened("inline") as context:
        queue = handles.CompletionQueue(context, 4, affinity=handles.Affinity.of_running_loop())
        queue.destroy()
        with pytest.raises(ClosedResourceError):
            queue.resize(4)
        queue.destroy()
        await asyncio.to_thread(queue.destroy)
        # Afterwards no call counts as being inside.
        assert queue.affinity is not None
        queue.affinity.check(queue, "ibv_poll_cq")


def test_an_affinity_requires_a_running_loop() -> None:
    with pytest.raises(RuntimeError, match="no asyncio event loop is running in this thread"):
        handles.Affinity.of_running_loop()
    with pytest.raises(TypeError, match=r"of_running_loop\(\) or unbound\(\)"):
        handles.Affinity()


# ---- One call at a time


class ReentrantAllocator(Recording):
    """An allocator that calls a function in the middle of the verb that allocates."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self.meanwhile = meanwhile

    def allocate(self, size: int, alignment: int, resource_type: int, *of: object) -> object:
        self.meanwhile()
        return super().allocate(size, alignment, resource_type, *of)


@pytest.mark.parametrize("binding", ["of_running_loop", "unbound"])
async def test_an_allocator_does_not_reenter_its_domain(binding: str) -> None:
    caught: list[BaseException] = []

    def meanwhile() -> None:
        for verb in (partial(queue.resize, 4), queue.destroy, lambda: handles.SharedReceiveQueue(domain, 4)):
            with pytest.raises(ConcurrentAccessError, match=r"call \(ibv_create_cq_ex\) is still running") as refusal:
                verb()
            caught.append(refusal.value)

    with opened("inline") as context:
        pd, owner = handles.ProtectionDomain(context), getattr(handles.Affinity, binding)()
        domain = parent_domain.ParentDomain(pd, allocator=ReentrantAllocator(meanwhile), affinity=owner)
        queue = handles.CompletionQueue(context, 4, affinity=owner)
        handles.CompletionQueue(context, 4, parent_domain=domain)
        assert len(caught) == 3 * 2  # a ring and a doorbell record
        queue.resize(4)


@pytest.mark.parametrize("source", ["finalizer", "signal handler"])
async def test_finalizers_and_signal_handlers_do_not_reenter_the_domain(source: str) -> None:
    caught: list[BaseException] = []

    def reenter(*_: object) -> None:
        try:
            queue.resize(4)
        except ConcurrentAccessError as refusal:
            caught.append(refusal)

    class Finalized:
        def __del__(self) -> None:
            reenter()

    def meanwhile() -> None:
        if source == "finalizer":
            Finalized()
        else:
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, reenter)
    try:
        with opened("inline") as context:
            owner = handles.Affinity.of_running_loop()
            domain = parent_domain.ParentDomain(
                handles.ProtectionDomain(context), allocator=ReentrantAllocator(meanwhile), affinity=owner
            )
            queue = handles.CompletionQueue(context, 4, affinity=owner)
            handles.CompletionQueue(context, 4, parent_domain=domain)
            assert [str(refusal).count("is still running") for refusal in caught] == [1, 1]
            queue.resize(4)
    finally:
        signal.signal(signal.SIGUSR1, before)


async def test_overlapping_threads_are_refused() -> None:
    """An unbound affinity admits any thread, one at a time: here one thread stays inside a verb."""
    entered, release = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        assert release.wait(30)

    with opened("inline") as context:
        pd, owner = handles.ProtectionDomain(context), handles.Affinity.unbound()
        domain = parent_domain.ParentDomain(pd, allocator=ReentrantAllocator(block), affinity=owner)
        queue = handles.CompletionQueue(context, 4, affinity=owner)
        inside = asyncio.create_task(asyncio.to_thread(handles.CompletionQueue, context, 4, parent_domain=domain))
        assert await asyncio.to_thread(entered.wait, 30)
        for caller in (in_thread, lambda function: function()):
            with pytest.raises(ConcurrentAccessError, match=r"ibv_create_cq_ex.*still running"):
                caller(partial(queue.resize, 4))
        release.set()
        await inside
        queue.resize(4)
        in_thread(partial(queue.resize, 4))
        assert not owner.bound
        assert owner.thread_number is None
        assert owner.owns()


# ---- Threads


def test_thread_numbers_are_never_reused() -> None:
    async def number() -> int:
        number_of_thread = handles.Affinity.of_running_loop().thread_number
        assert number_of_thread is not None
        return number_of_thread

    idents, numbers = set(), set()
    for _ in range(50):
        thread = threading.Thread(target=lambda: numbers.add(asyncio.run(number())))
        thread.start()
        idents.add(thread.ident)
        thread.join()
    assert len(numbers) == 50
    assert len(idents) < 50, "the system did not reuse any thread ID"


async def test_an_affinity_does_not_keep_its_loop_alive() -> None:
    def thread() -> "weakref.ref[asyncio.AbstractEventLoop]":
        async def use() -> None:
            handles.Affinity.of_running_loop().check("x", "verb")

        loop = asyncio.SelectorEventLoop()
        loop.run_until_complete(use())
        loop.close()
        return weakref.ref(loop)

    reference = in_thread(thread)
    collect_garbage()
    assert reference() is None
