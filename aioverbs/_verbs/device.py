"""Devices: which there are, and what is made on one."""

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aioverbs._core.handles import handles, parent_domain as core
from aioverbs._core.software.software import Context as SoftwareContext, FaultPlan
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import ThreadModel
from aioverbs._lifecycle.lifecycle import ResourceInfo, reap
from aioverbs._lifecycle.resource import HandleResource, Resource, ResourceStatistics
from aioverbs._monitoring.monitor import start_where_wanted
from aioverbs._monitoring.snapshot import remember
from aioverbs._providers import hardware, software
from aioverbs._providers.peer_log import attend, log
from aioverbs._providers.sysfs import kernel_devices
from aioverbs._sharing.shared_pd import check_share
from aioverbs._verbs.async_events import DeviceEvent, EventPump
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.loop_domain import LoopDomain, SharedByBlocks
from aioverbs._verbs.ports import gid_table
from aioverbs._verbs.protection_domain import InterchangeableDomain, ProtectionDomain
from aioverbs._verbs.resource_domain import ResourceDomain
from aioverbs._verbs.thread_domain import ThreadDomain, ThreadDomainBudget
from aioverbs._verbs.xrc_domain import XrcDomain
from aioverbs.allocators import Allocator
from aioverbs.attributes import DeviceAttributes, Execution, PortAttributes
from aioverbs.errors import DeviceNotFoundError, VerbsError
from aioverbs.gid_selection import preferred
from aioverbs.software_peers import Peer, RejectedPeer
from aioverbs.types import LinkLayer, Mtu, PortState

if TYPE_CHECKING:
    from pyverbs.device import Context as PyverbsContext
    from pyverbs.pd import PD


__all__ = ["Device", "DeviceInfo", "DeviceStatistics", "PortInfo", "devices", "open_device", "opening_of"]

logger = logging.getLogger("aioverbs")


@dataclass(frozen=True)
class PortInfo:
    """A port: its number, state, link layer and MTU, and its GIDs by their index, where there is one.

    :param gid_index: which of them queue pairs send from that are not told another one; None where there is none.
    """

    number: int
    state: PortState
    link_layer: LinkLayer
    active_mtu: Mtu
    gids: tuple[tuple[int, str], ...]
    gid_index: int | None = None


@dataclass(frozen=True)
class DeviceInfo:
    """A device of this machine.

    :param provider: ``"software"`` or ``"hardware"``.
    :param native: which of thread domains, parent domains and XRC domains it has.
    :param problem: why it cannot be opened; then nothing is known of its ports.
    """

    name: str
    provider: str
    ports: tuple[PortInfo, ...]
    native: frozenset[str]
    problem: str | None = None

    @property
    def active(self) -> bool:
        """Whether one of its ports is."""
        return any(port.state is PortState.ACTIVE for port in self.ports)


@dataclass(frozen=True)
class DeviceStatistics(ResourceStatistics):
    """How many objects of a device are open, by what the device counts, and how many thread domains are native.

    :param overlaps: calls that met another one inside of an object without locks, and were refused.
    """

    native_thread_domains: int
    objects: tuple[tuple[str, int], ...]
    overlaps: int


def devices() -> list[DeviceInfo]:
    """The devices of this machine, RDMA devices first, the software device last."""
    try:
        names = hardware.names()
    except OSError:  # with libibverbs and pyverbs missing, too
        names = []
    return [_look_at(name) for name in (*names, *software.names())]


def _provider_of(name: str) -> str:
    return "software" if software.is_software(name) else "hardware"


def _open_context(name: str, *, execution: Execution = "inline", delay_ns: int = 0) -> handles.Context:
    if _provider_of(name) == "software":
        return software.open_context(name, execution=execution, delay_ns=delay_ns)
    if execution != "inline" or delay_ns:
        (soft,) = software.names()
        raise ValueError(
            f"`execution` and `delay_ns` are for the software device: leave them out for {name}, or open {soft}"
        )
    try:
        return hardware.open_context(name)
    except DeviceNotFoundError as error:
        raise DeviceNotFoundError(name, (*error.available, *software.names())) from None


def _look_at(name: str) -> DeviceInfo:
    try:
        context = _open_context(name)
    except (OSError, DeviceNotFoundError, ValueError) as error:  # not found: it went meanwhile
        return DeviceInfo(name, _provider_of(name), (), frozenset(), str(error))
    try:
        ports = tuple(_port(context, number + 1) for number in range(context.attributes.phys_port_cnt))
        return DeviceInfo(context.name, _provider_of(name), ports, frozenset(_native(context)))
    finally:
        context.destroy()


def _port(context: handles.Context, number: int) -> PortInfo:
    port = context.query_port(number)
    gids = gid_table(context, number)
    readable = tuple((each.index, str(ipaddress.IPv6Address(each.gid))) for each in gids)
    return PortInfo(number, port.state, port.link_layer, port.active_mtu, readable, preferred(gids))


def _native(context: handles.Context) -> list[str]:
    """By trying: what a provider does not have answers so."""
    found = []
    made: list[handles.Handle] = []
    try:
        with contextlib.suppress(VerbsError):
            made.append(core.ThreadDomain(context))
            found.append("thread domains")
        with contextlib.suppress(VerbsError):
            made.append(handles.ProtectionDomain(context))
            pd = made[-1]
            assert isinstance(pd, handles.ProtectionDomain)
            made.append(core.ParentDomain(pd))
            found.append("parent domains")
        with contextlib.suppress(VerbsError):
            made.append(handles.XrcDomain(context))
            found.append("XRC domains")
    finally:
        for handle in reversed(made):
            handle.destroy()
    return found


class Device(HandleResource[handles.Context]):
    """An open device: ``ibv_open_device``. Any event loop may use it. Made by `open_device`.

    One that is forgotten is closed by the loop that opened it, or where that is gone by the next that opens a device.
    """

    def __init__(
        self, name: str | None, max_native_thread_domains: int | None, execution: Execution, delay_ns: int
    ) -> None:
        super().__init__()
        self._name = name
        self._execution = execution
        self._delay_ns = delay_ns
        self._budget = ThreadDomainBudget(max_native_thread_domains)
        self._lent: PyverbsContext | None = None  # the user's own pyverbs context
        self._loop_domains: dict[asyncio.AbstractEventLoop, SharedByBlocks] = {}

    @staticmethod
    def from_pyverbs(context: "PyverbsContext", *, max_native_thread_domains: int | None = None) -> "Device":
        """A device over a pyverbs context that the user opened, keeps, and closes when this is closed.

        What is made from it is destroyed before, as libibverbs demands and pyverbs does not see. Where the user closes
        it first, everything here raises `BorrowedObjectClosedError` and can only be closed, with a ResourceWarning.
        Its protection domains and memory regions follow by `adopt_protection_domain` and
        `ProtectionDomain.adopt_memory_region`.

        :param context: an open `pyverbs.device.Context`.
        :param max_native_thread_domains: as for `open_device`.

        Opening raises `TypeError` where it is something else, `ValueError` where it is closed, `LibraryNotFoundError`.
        """
        device = Device(None, max_native_thread_domains, "inline", 0)
        device._lent = context
        return device

    def _make_context(self) -> handles.Context:
        if self._lent is not None:
            return hardware.adopt_context(self._lent)
        name = self._name or os.environ.get("AIOVERBS_DEVICE") or _first_active()
        return _open_context(name, execution=self._execution, delay_ns=self._delay_ns)

    def _open(self) -> None:
        context = self._make_context()
        self._handle = context
        self._lifecycle.hold(context)
        self._lifecycle.label = context.name
        self._pump = EventPump.of(context)
        self._pump.find = self._lifecycle.find
        # Nothing of the device's own, or it could not be forgotten.
        self._lifecycle.drain = functools.partial(_drain, context, self._pump)
        attend(context)
        with contextlib.suppress(RuntimeError):  # in a trio task, or nowhere
            self._lifecycle.opener = asyncio.get_running_loop()
        if self._lifecycle.opener is not None:
            reap()
        remember(self)
        start_where_wanted()

    def _check_open(self) -> None:
        super()._check_open()
        if self._lent is not None:
            assert self._handle is not None
            # Asking the handle is what finds that its user closed it, and the descriptor of its events with it.
            self._handle.address  # noqa: B018

    @property
    def name(self) -> str:
        """Its name, as ``"mlx5_0"``, ``"soft0"`` or ``"soft0@10.0.0.1:7470"``."""
        return self.handle.name

    @property
    def software(self) -> bool:
        """Whether it is a software device."""
        return self.handle.software

    @property
    def faults(self) -> FaultPlan:
        """What is to go wrong on it, and when, of a software device: verbs and requests that fail, messages that are
        lost or late, a port that goes down, a device that is lost. Its methods take queue pairs by their `handle`.

        :raises ValueError: it is an RDMA device.
        """
        context = self.handle
        if not isinstance(context, SoftwareContext):
            raise ValueError(f"{context!r} is not of the software device: only that one fails as planned")
        return context.faults

    def attributes(self) -> DeviceAttributes:
        """What it can do: ``ibv_query_device``."""
        return self.handle.query_device()

    def port(self, number: int = 1) -> PortAttributes:
        """The state of a port: ``ibv_query_port``."""
        return self.handle.query_port(number)

    def protection_domain(self) -> ProtectionDomain:
        """A protection domain: see there."""
        return ProtectionDomain(self, self.handle, self._budget)

    def adopt_protection_domain(self, pd: "PD") -> ProtectionDomain:
        """A protection domain that the user made with pyverbs, on the context that `from_pyverbs` adopted.

        The user keeps it, and closes it when this is closed: before that pyverbs fails to, with EBUSY, as long as
        something that was made from it here is open; else using this raises `BorrowedObjectClosedError`. Memory that
        the user registered on it follows by `ProtectionDomain.adopt_memory_region`.

        Opening raises `TypeError` where it is something else, as a parent domain, `ValueError` where it is closed or of
        another context.

        :param pd: an open `pyverbs.pd.PD`.
        """
        return ProtectionDomain(self, self.handle, self._budget, lent=pd)

    def shared_protection_domain(self, shared_id: int, share_key: int) -> ProtectionDomain:
        """An instance of a protection domain that was shared, by another context of the same device: ``ibv_share_pd``.

        On a software device any other context that this process has of it can have it, and a device that
        `import_device` made for it. On RDMA devices it is the context that has it, or one that `import_device` made
        over that one.

        Opening raises `VerbsError`: with ENOENT where nothing is shared by that id, with EACCES where the key is
        another one, with EXDEV where the id is of another device, with EOPNOTSUPP where the provider does not have what
        that takes.

        :param shared_id: `SharedProtectionDomain.id`.
        :param share_key: the key that it was shared with, 64 bits.
        """
        check_share(shared_id, share_key)
        return ProtectionDomain(self, self.handle, self._budget, (shared_id, share_key))

    def thread_domain(self, *, require_native: bool = False) -> ThreadDomain:
        """A thread domain of the loop that opens it: see there.

        :param require_native: raise where the provider has none, or no more of them, instead of going on without.
        """
        return ThreadDomain(self, self.handle, self._budget, require_native=require_native)

    def resource_domain(
        self,
        pd: InterchangeableDomain | None = None,
        *,
        thread_model: ThreadModel = ThreadModel.SINGLE,
        message_model: MessageModel = MessageModel.DEFAULT,
        allocator: Allocator | None = None,
        context: object = None,
        require_native: bool = False,
    ) -> ResourceDomain:
        """A resource domain: see there."""
        return ResourceDomain(
            self,
            self.handle,
            self._budget,
            pd,
            thread_model=thread_model,
            message_model=message_model,
            allocator=allocator,
            context=context,
            require_native=require_native,
        )

    def loop_domain(self) -> AbstractAsyncContextManager[ResourceDomain, None]:
        """The one resource domain of the running loop that everybody on it may share, as long as somebody does.

        It is opened by whoever comes first and closed by whoever leaves last. Where a loop is closed before that, it is
        forgotten, and closed with the device.

        :raises AffinityError: another loop entered the block that this one leaves; nothing was done.
        :raises RuntimeError: no asyncio event loop is running.
        """
        return LoopDomain(self.resource_domain, self._loop_domains)

    def xrc_domain(self, fd: int = -1, oflag: int = os.O_CREAT) -> XrcDomain:
        """An XRC domain: see there."""
        return XrcDomain(self, self.handle, fd, oflag)

    def events(self, resource: Resource | None = None) -> AsyncGenerator[DeviceEvent, None]:
        """Asynchronous events of the device and of all that was made from it: ``async for``.

        It ends when the device is closed. Events that nobody listens for wait, the latest 1,024 of them. The event loop
        that asks for the first event owns the iterator.

        :param resource: only what happens to this queue pair, completion queue or shared receive queue, which has this
            as its `events`, too; then it ends when that is closed.
        """
        self._check_open()
        return self._pump.listen(resource)

    def resources(self) -> ResourceInfo:
        """It and all that was made from it, as they are now. Rich prints it as a tree."""
        return self._lifecycle.info()

    def peers(self) -> tuple[Peer, ...]:
        """The streams between a software device and those of other processes, those of all its contexts here.

        An RDMA device has none.
        """
        return log(context).peers if isinstance(context := self.handle, SoftwareContext) else ()

    def refusals(self) -> tuple[RejectedPeer, ...]:
        """The last peers that a software device turned away, or whose streams it closed for what came over them.

        Each of them is a warning of the logger ``aioverbs.fabric``, too: once it is asked for here or by `peers`, when
        the device is closed, or by the loop that uses the device about a second later. An RDMA device has none.
        """
        return log(context).refusals if isinstance(context := self.handle, SoftwareContext) else ()

    def statistics(self) -> DeviceStatistics:
        """Counts of what is open. Those of objects are the software device's own; for others there are none."""
        counts = dict(context.counts()) if isinstance(context := self.handle, SoftwareContext) else {}
        overlaps = counts.pop("overlaps", 0)
        assert isinstance(overlaps, int)
        objects = tuple((kind, count) for kind, count in counts.items() if isinstance(count, int))
        return DeviceStatistics(len(self._lifecycle.children), self._budget.used, objects, overlaps)


async def _drain(context: handles.Context, pump: EventPump) -> None:
    if isinstance(context, SoftwareContext) and context.has_fabric:
        log(context)
    await pump.drain()


def open_device(
    name: str | None = None,
    *,
    max_native_thread_domains: int | None = None,
    execution: Execution = "inline",
    delay_ns: int = 0,
) -> Device:
    """A device to be opened, by ``async with`` or by `Device.open`.

    :param name: its name; without one what the environment variable AIOVERBS_DEVICE says; without that the first RDMA
        device with an active port, or else the software device, with a warning to the log that says why. A software
        device that other hosts are to find has its address, and a TCP port, in its name: ``"soft0@10.0.0.1:7470"`` or
        ``"soft0@[fd00::1]:7470"``, and ``"soft0"`` is the one with the address that AIOVERBS_SOFT_ADDRESS has, if any.
        Each is a device of its own.
    :param max_native_thread_domains: how many thread domains may be native at once; None: as many as it has. Those
        beyond are open without being native.
    :param execution: for the software device only: ``"inline"`` executes a request in the call that posts it,
        ``"thread"`` in a thread of the device, beside the event loop as hardware does.
    :param delay_ns: with ``"thread"`` only: the least time from posting to execution, in nanoseconds.

    Opening raises `DeviceNotFoundError`, `LibraryNotFoundError` or `VerbsError`; `ValueError` where it is an RDMA
    device and one of the last two was given, or where the address in a software device's name is none.
    """
    return Device(name, max_native_thread_domains, execution, delay_ns)


def _first_active() -> str:
    """The first RDMA device with an active port, else the software device."""
    reasons = []
    try:
        names = hardware.names()
    except OSError as error:
        names = []
        if kernel_devices():  # else nothing that could be installed leads to one
            reasons.append(str(error))
    for name in names:
        found = _look_at(name)
        if found.active:
            return name
        why = f"{name} cannot be opened: {found.problem}" if found.problem else f"no port of {name} is active"
        reasons.append(why)
    (fallback,) = software.names()
    logger.warning("opening the software device %s: %s", fallback, "; ".join(reasons) or "there is no RDMA device")
    return fallback


def opening_of(device: Device) -> tuple[Execution, int, int | None]:
    """How a device was to be opened: ``execution``, ``delay_ns`` and ``max_native_thread_domains``."""
    return device._execution, device._delay_ns, device._budget.limit


publish(__name__)
