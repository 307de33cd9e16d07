"""Capabilities that tests need of their device; a test is skipped on devices that lack one.

    @needs(Capability.FAULT_PLAN)
    async def test_a_verb_that_fails(device: Device) -> None: ...

Probes determine the capabilities of a device, once for each device.
"""

import enum
import errno
import functools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from aioverbs import AccessFlags, MwType, QpType, SendFlags, SendOpcode, VerbsError, WcStatus
from aioverbs._core.handles import handles, parent_domain
from aioverbs.types import WcFlags
from tests.core.pairs import succeed, wait_for
from tests.pace import patience
from tests.raw_verbs import bind_window, poll, post_recv, post_send
from tests.rdma.seam import Pair, opened, to_itself

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Capability", "capabilities", "marks_of", "needs", "qp_types", "skip_where_missing"]


class Capability(enum.Enum):
    """Capability that some devices lack."""

    FAULT_PLAN = "a fault plan: a test makes verbs, requests and messages fail, lost or held"
    OBJECT_COUNTS = "counts of its objects"
    STAND_INS = "contexts not made by libibverbs, for stand-ins of pyverbs' objects"
    EXACT_STATUSES = "the status that the InfiniBand specification defines for each failure"
    CHECKS_INVALIDATED_KEYS = "an error for messages that invalidate an unknown key"
    REPORTS_INVALIDATED_KEYS = "the invalidated key in the completion of the receive"
    INVALIDATES_ON_UC = "invalidation on queue pairs of type UC"
    THREAD_DOMAINS = "thread domains"
    PARENT_DOMAINS = "parent domains"
    XRC_DOMAINS = "XRC domains"
    SHARED_DOMAINS = "protection domains shared between its contexts"
    READ_ONLY_MAPPINGS = "regions of shared memory that is mapped read-only"
    NO_ON_DEMAND_PAGING = "an error for regions with on-demand paging"
    CQ_MODERATION = "moderation of completion events"


def _can_make(make: Callable[[], handles.Handle]) -> bool:
    """Create and destroy a handle; return whether the device supports it."""
    try:
        handle = make()
    except VerbsError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return False
    handle.destroy()
    return True


def _parent_domains(context: handles.Context) -> bool:
    pd = handles.ProtectionDomain(context)
    try:
        return _can_make(lambda: parent_domain.ParentDomain(pd))
    finally:
        pd.destroy()


def _shared_domains(context: handles.Context) -> bool:
    if context.software:  # shared within the process, by number
        return True
    descriptor = context.dup_cmd_fd()
    try:
        return _can_make(lambda: handles.Context.import_device(descriptor))
    finally:
        os.close(descriptor)


def _registers(context: handles.Context, memory: "Buffer", access: AccessFlags) -> bool:
    pd = handles.ProtectionDomain(context)
    try:
        handles.MemoryRegion(pd, memory, access).destroy()
    except VerbsError:
        return False
    finally:
        pd.destroy()
    return True


def _read_only_mappings(context: handles.Context) -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE, access=mmap.ACCESS_READ) as memory:
        return _registers(context, memory, AccessFlags.REMOTE_READ)


def _on_demand_paging(context: handles.Context) -> bool:
    return _registers(context, bytearray(64), AccessFlags.LOCAL_WRITE | AccessFlags.ON_DEMAND)


def _moderation(context: handles.Context) -> bool:
    cq = handles.CompletionQueue(context, 16)
    try:
        cq.modify(1, 1)
    except VerbsError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        return False
    finally:
        cq.destroy()
    return True


@contextmanager
def _pair(context: handles.Context) -> Iterator[Pair]:
    pd = handles.ProtectionDomain(context)
    pair = Pair(pd, pd, size=64)
    try:
        yield pair
    finally:
        pair.destroy()
        pd.destroy()


def _exact_statuses(context: handles.Context) -> bool:
    with _pair(context) as pair:
        address, length, lkey = pair.sge(0, 0, 8)
        post_send(pair.qps[0], SendOpcode.SEND, [(address, length, lkey ^ 0x5500)], flags=SendFlags.SIGNALED)
        return wait_for(pair.queues[0])[0].status is WcStatus.LOC_PROT_ERR


def _checks_invalidated_keys(context: handles.Context) -> bool:
    with _pair(context) as pair:
        post_recv(pair.qps[1], [pair.sge(1, 0, 8)])
        key = pair.regions[1].rkey ^ 0x5500
        post_send(pair.qps[0], SendOpcode.SEND_WITH_INV, flags=SendFlags.SIGNALED, invalidate_rkey=key)
        # If the peer ignores the message, the request ends when its retries are exhausted.
        return wait_for(pair.queues[0])[0].status is not WcStatus.SUCCESS


@contextmanager
def _bound(pair: Pair, qp: handles.QueuePair) -> Iterator[int]:
    """Yield the key of a window of type 2 that a queue pair has bound."""
    pd, cq = pair.regions[0].pd, qp.send_cq
    assert cq is not None
    region = handles.MemoryRegion(pd, bytearray(64), AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND)
    window = handles.MemoryWindow(pd, MwType.TYPE_2)
    try:
        bind_window(qp, window, region, region.address, 64, AccessFlags.REMOTE_READ, flags=SendFlags.SIGNALED)
        succeed(cq)
        yield window.rkey
    finally:
        window.destroy()
        region.destroy()


def _reports_invalidated_keys(context: handles.Context) -> bool:
    with _pair(context) as pair, _bound(pair, pair.qps[1]) as key:
        post_recv(pair.qps[1], [pair.sge(1, 0, 8)])
        post_send(pair.qps[0], SendOpcode.SEND_WITH_INV, flags=SendFlags.SIGNALED, invalidate_rkey=key)
        found = pair.wait(1)
        return bool(found.wc_flags & WcFlags.WITH_INV) and found.invalidated_rkey == key


def _invalidates_on_uc(context: handles.Context) -> bool:
    with _pair(context) as pair:
        cq = pair.queues[0]
        qp = handles.QueuePair(pair.regions[0].pd, cq, cq, qp_type=QpType.UC)
        try:
            to_itself(qp)
            with _bound(pair, qp) as key:
                post_send(qp, SendOpcode.LOCAL_INV, flags=SendFlags.SIGNALED, invalidate_rkey=key)
                return _first_status(cq) is WcStatus.SUCCESS
        finally:
            qp.destroy()


def _first_status(cq: handles.CompletionQueue) -> WcStatus | None:
    """Return the status of the next completion, or None if there is none within a second."""
    end = time.monotonic() + patience(1)
    while not (found := poll(cq, 1)) and time.monotonic() < end:
        pass
    return found[0].status if found else None


_PROBES: dict[Capability, Callable[[handles.Context], bool]] = {
    Capability.FAULT_PLAN: lambda context: context.software,
    Capability.OBJECT_COUNTS: lambda context: context.software,
    Capability.STAND_INS: lambda context: context.software,
    Capability.EXACT_STATUSES: _exact_statuses,
    Capability.CHECKS_INVALIDATED_KEYS: _checks_invalidated_keys,
    Capability.REPORTS_INVALIDATED_KEYS: _reports_invalidated_keys,
    Capability.INVALIDATES_ON_UC: _invalidates_on_uc,
    Capability.THREAD_DOMAINS: lambda context: _can_make(lambda: parent_domain.ThreadDomain(context)),
    Capability.PARENT_DOMAINS: _parent_domains,
    Capability.XRC_DOMAINS: lambda context: _can_make(lambda: handles.XrcDomain(context)),
    Capability.SHARED_DOMAINS: _shared_domains,
    Capability.READ_ONLY_MAPPINGS: _read_only_mappings,
    Capability.NO_ON_DEMAND_PAGING: lambda context: not _on_demand_paging(context),
    Capability.CQ_MODERATION: _moderation,
}


@functools.cache
def capabilities(name: str) -> frozenset[Capability]:
    """Return the capabilities of a device."""
    with opened(name) as context:
        return frozenset(capability for capability, probe in _PROBES.items() if probe(context))


def needs(*wanted: Capability) -> pytest.MarkDecorator:
    """Mark a test or a parameter to be skipped on devices that lack one of the capabilities."""
    return pytest.mark.needs(*wanted)


def marks_of(qp_type: QpType) -> tuple[pytest.MarkDecorator, ...]:
    """Return the marks of a parameter with a type of queue pair: XRC types need XRC domains."""
    return (needs(Capability.XRC_DOMAINS),) if qp_type in (QpType.XRC_SEND, QpType.XRC_RECV) else ()


def qp_types(*of: QpType) -> pytest.MarkDecorator:
    """Parametrize a test with types of queue pairs, as `qp_type`."""
    return pytest.mark.parametrize("qp_type", [pytest.param(each, id=each.name, marks=marks_of(each)) for each in of])


def skip_where_missing(request: pytest.FixtureRequest, name: str) -> None:
    """Skip a test if the device lacks a capability that the test needs."""
    wanted = {capability for mark in request.node.iter_markers("needs") for capability in mark.args}
    missing = wanted - capabilities(name)
    if missing:
        pytest.skip(f"{name} lacks {', '.join(sorted(each.value for each in missing))}")
