"""Queues whose memory comes from a native allocator: the provider's callbacks run in C."""

import ctypes
import errno
from collections.abc import Callable

import pytest

from aioverbs import BusyResourceError, SendFlags, SendOpcode, VerbsError
from aioverbs._core.handles import handles, parent_domain
from aioverbs._core.software import software
from aioverbs.allocators import (
    USE_DEFAULT,
    Allocator,
    ArenaAllocator,
    DefaultAllocator,
    HugePageAllocator,
    NativeAllocator,
    NumaAllocator,
    RecordingAllocator,
    ResourceKind,
    SharedPageAllocator,
)
from tests.core.allocators import CQ, QP, RECORD, Recording
from tests.core.children import in_child
from tests.core.pairs import connect, make_end, succeed
from tests.core.pieces import huge_pages_free
from tests.raw_verbs import post_send

SRQ = 1 << 32 | 4
TYPES = {CQ: "completion queue", RECORD: "doorbell record", QP: "queue pair", SRQ: "shared receive queue"}


def domain_of(context: software.Context, allocator: Allocator | Recording) -> parent_domain.ParentDomain:
    return parent_domain.ParentDomain(handles.ProtectionDomain(context), None, allocator)


def pieces(allocator: RecordingAllocator) -> dict[str, int]:
    """Return the number of pieces in use by kind, without the kinds that have none."""
    return {kind.kind: usage.pieces for kind, usage in allocator.usage().items() if usage.pieces}


@pytest.mark.parametrize("make", [ArenaAllocator, SharedPageAllocator])
def test_queues_use_memory_of_the_allocator(context: software.Context, make: Callable[[], NativeAllocator]) -> None:
    allocator = RecordingAllocator(make())
    domain = domain_of(context, allocator)
    assert domain.allocator is allocator
    near, far = make_end(domain), make_end(domain)
    srq = handles.SharedReceiveQueue(domain, 16, 2)
    connect(near.qp, far.qp)
    assert pieces(allocator) == {
        "completion queue": 2,
        "doorbell record": 5,
        "queue pair": 2,
        "shared receive queue": 1,
    }
    assert domain.held == allocator.statistics().pieces == 10
    assert [kind.provider for kind in allocator.usage()] == ["mlx5"] * 4
    assert {kind.resource_type: kind.kind for kind in allocator.usage()} == TYPES

    near.memory[:5] = b"moved"
    post_send(
        near.qp,
        SendOpcode.RDMA_WRITE,
        [near.sge(0, 5)],
        flags=SendFlags.SIGNALED,
        remote_addr=far.region.address,
        rkey=far.region.rkey,
    )
    succeed(near.cq)
    assert far.memory[:5] == b"moved"
    with pytest.raises(BusyResourceError):
        domain.destroy()

    near.cq.resize(2000)
    srq.modify(max_wr=200)
    assert domain.held == allocator.statistics().pieces == 10
    assert allocator.usage()[ResourceKind.decode(CQ)].allocations == 3
    for end in (near, far):
        end.qp.destroy()
        end.cq.destroy()
    srq.destroy()
    assert domain.held == allocator.statistics().pieces == 0
    assert pieces(allocator) == {}


def test_queues_with_the_default_allocator(context: software.Context) -> None:
    allocator = RecordingAllocator(DefaultAllocator())
    domain = domain_of(context, allocator)
    near, far = make_end(domain), make_end(domain)
    connect(near.qp, far.qp)
    post_send(near.qp, SendOpcode.RDMA_WRITE, flags=SendFlags.SIGNALED)
    succeed(near.cq)
    assert domain.held == 0
    usage = allocator.usage()
    assert [usage[ResourceKind.decode(kind)].defaults for kind in (CQ, RECORD, QP)] == [2, 4, 2]
    assert not any(each.allocations or each.failures for each in usage.values())


def without_memory() -> dict[str, tuple[NativeAllocator, str]]:
    """Return allocators that have no memory here, with the text of their error."""
    allocators: dict[str, tuple[NativeAllocator, str]] = {"node": (NumaAllocator(1000, strict=True), "NUMA node")}
    if not huge_pages_free(2 << 20):
        allocators["huge pages"] = HugePageAllocator(strict=True), "nr_hugepages|has no huge pages"
    return allocators


def test_an_exhausted_allocator_is_the_cause_of_the_error(context: software.Context) -> None:
    """The verb fails with the allocator's errno, and the allocator's error is the cause."""
    for allocator, text in without_memory().values():
        recording = RecordingAllocator(allocator)
        for each in (allocator, recording):
            domain = domain_of(context, each)
            for _ in range(2):
                with pytest.raises(VerbsError, match="ibv_create_cq_ex failed") as caught:
                    handles.CompletionQueue(context, 16, parent_domain=domain)
                cause = caught.value.__cause__
                assert isinstance(cause, OSError)
                assert cause.errno == caught.value.errno
                cause_text = str(cause)
                assert any(part in cause_text for part in text.split("|"))
            cq = handles.CompletionQueue(context, 16)
            with pytest.raises(VerbsError, match="ibv_create_qp failed") as caught:
                handles.QueuePair(domain, cq, cq)
            assert isinstance(caught.value.__cause__, OSError)
            cq.destroy()
            assert domain.held == allocator.statistics().pieces == 0
            domain.destroy()
        assert recording.usage()[ResourceKind.decode(CQ)].failures == 2


def test_a_cause_is_reported_once(inline: software.Context) -> None:
    """A later failure for another reason does not have the earlier cause."""
    domain = domain_of(inline, NumaAllocator(1000, strict=True))
    with pytest.raises(VerbsError) as caught:
        handles.CompletionQueue(inline, 16, parent_domain=domain)
    assert caught.value.__cause__ is not None
    for cqe in (1 << 30, 1 << 30):
        with pytest.raises(VerbsError) as caught:
            handles.CompletionQueue(inline, cqe, parent_domain=domain)
        assert caught.value.errno == errno.EINVAL
        assert caught.value.__cause__ is None


def test_one_allocator_for_many_domains_and_buffers(context: software.Context) -> None:
    allocator = RecordingAllocator(ArenaAllocator())
    first, second = domain_of(context, allocator), domain_of(context, allocator)
    address = allocator.allocate(10_000, 4096)
    assert isinstance(address, int)
    memory = (ctypes.c_char * 10_000).from_address(address)
    region = handles.MemoryRegion(first, memory)
    ends = make_end(first), make_end(second)
    connect(ends[0].qp, ends[1].qp)
    assert (first.held, second.held) == (4, 4)
    buffer = ResourceKind("aioverbs", "buffer", 0)
    assert allocator.usage()[buffer].size_bytes == 10_000
    region.destroy()
    allocator.free(address)
    assert allocator.usage()[buffer].pieces == 0
    assert allocator.usage()[buffer].peak_bytes == 10_000


def test_the_domain_keeps_its_allocator(context: software.Context) -> None:
    """The domain holds the only reference, and pieces are in use."""
    end = make_end(domain_of(context, ArenaAllocator()))
    end.qp.destroy()
    end.cq.destroy()


def test_a_forked_child_uses_the_allocator(context: software.Context) -> None:
    """The child has neither the domain nor its memory, and opens its own with the same allocator."""
    allocator = RecordingAllocator(ArenaAllocator())
    domain = domain_of(context, allocator)
    end = make_end(domain)

    def child() -> int:
        end.qp.destroy()
        end.cq.destroy()
        domain.destroy()
        assert allocator.usage() == {}
        own = software.Context.open()
        child_end = make_end(domain_of(own, allocator))
        return sum(usage.pieces for usage in allocator.usage().values()) + bool(child_end.qp.closed)

    assert in_child(child) == 4
    assert domain.held == allocator.statistics().pieces == 4


def call_in_foreign_thread(function: Callable[[], None]) -> None:
    """Call a function in a thread that Python did not start."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed: list[BaseException] = []

    def start(_: int | None) -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = ctypes.c_ulong()
    routine = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(start)
    assert libc.pthread_create(ctypes.byref(thread), None, routine, None) == 0
    assert libc.pthread_join(thread, None) == 0
    if failed:
        raise failed[0]


@pytest.mark.parametrize("make", [ArenaAllocator, lambda: RecordingAllocator(Recording())])
def test_queues_made_in_a_foreign_thread(context: software.Context, make: Callable[[], Allocator | Recording]) -> None:
    allocator = make()
    domain = domain_of(context, allocator)
    ends = []
    call_in_foreign_thread(lambda: ends.append(make_end(domain)))
    assert domain.held == 4
    end = ends.pop()
    call_in_foreign_thread(end.qp.destroy)
    end.cq.destroy()
    assert domain.held == 0


# ---- Recording an allocator in Python


def test_recording_an_allocator_in_python(context: software.Context) -> None:
    inner = Recording()
    allocator = RecordingAllocator(inner)
    assert allocator.inner is inner
    assert not allocator.native
    with pytest.raises(TypeError, match="is an allocator in Python"):
        _ = allocator.c_functions
    with pytest.raises(TypeError, match="is an allocator in Python"):
        ArenaAllocator(allocator)
    domain = domain_of(context, RecordingAllocator(allocator))
    end = make_end(domain)
    assert inner.resource_types == [CQ, RECORD, QP, RECORD]
    assert pieces(allocator) == {"completion queue": 1, "doorbell record": 2, "queue pair": 1}
    assert allocator.statistics().pieces == domain.held == len(inner.live) == 4
    assert allocator.statistics().mapped_bytes == 0  # not known for an allocator in Python
    end.qp.destroy()
    end.cq.destroy()
    assert pieces(allocator) == {}
    assert allocator.statistics().pieces == domain.held == len(inner.live) == 0
    assert allocator.usage()[ResourceKind.decode(RECORD)].peak_bytes == 16


class AllocatorError(Exception):
    pass


def test_answers_of_an_allocator_in_python() -> None:
    answers: list[object] = [USE_DEFAULT, None, "nonsense", AllocatorError("no more"), 0, 4096, 4096]

    class Answering:
        def __init__(self) -> None:
            self.freed: list[int] = []

        def allocate(self, size: int, alignment: int, resource_type: int, *of: object) -> object:
            answer = answers.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer

        def free(self, address: int, resource_type: int, *of: object) -> None:
            self.freed.append(address)

    inner = Answering()
    allocator = RecordingAllocator(inner)
    assert allocator.allocate(8, 8, RECORD) is USE_DEFAULT
    assert allocator.allocate(8, 8, RECORD) is None
    nonsense: object = allocator.allocate(8, 8, RECORD)
    assert nonsense == "nonsense"
    with pytest.raises(AllocatorError, match="no more"):
        allocator.allocate(8, 8, RECORD)
    assert allocator.allocate(8, 8, RECORD) == 0
    assert allocator.allocate(8, 8, RECORD) == 4096
    with pytest.raises(ValueError, match="0x1000, which is in use"):
        allocator.allocate(8, 8, RECORD)
    usage = allocator.usage()[ResourceKind.decode(RECORD)]
    assert (usage.pieces, usage.allocations, usage.defaults, usage.failures) == (1, 1, 1, 4)
    with pytest.raises(ValueError, match="0x2000 is not a piece of"):
        allocator.free(8192, RECORD)
    assert inner.freed == []
    allocator.free(4096, RECORD)
    assert inner.freed == [4096]


def test_resource_types() -> None:
    texts = {
        1 << 32 | 2: "mlx5 receive work queue",
        1 << 32 | 6: "mlx5 resource 6",
        21 << 32 | 1: "ionic completion queue",
        14 << 32 | 1: "rxe resource 1",
        22 << 32 | 1: "driver 22 resource 1",
        3: "unknown resource 3",
        0: "aioverbs buffer",
    }
    for resource_type, text in texts.items():
        kind = ResourceKind.decode(resource_type)
        assert str(kind) == text
        assert kind.resource_type == resource_type
        with pytest.raises(AttributeError):
            kind.kind = "another"  # type: ignore[misc]


def test_usage_does_not_change() -> None:
    allocator = RecordingAllocator(SharedPageAllocator())
    before = allocator.usage()
    address = allocator.allocate(8, 8, CQ)
    assert before == {}
    (after,) = allocator.usage().values()
    assert after.pieces == 1
    with pytest.raises(TypeError, match="does not support item assignment"):
        allocator.usage()[ResourceKind.decode(CQ)] = after  # type: ignore[index]
    assert isinstance(address, int)
    allocator.free(address, CQ)
    assert after.pieces == 1
