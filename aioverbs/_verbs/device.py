"""Devices: listing and opening them, and making resources from an open device."""

import asyncio
import contextlib
import functools
import ipaddress
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import anyio.to_thread

from aioverbs._core.handles import handles, parent_domain as core
from aioverbs._core.software.software import Context as SoftwareContext, FaultPlan
from aioverbs._exports import publish
from aioverbs._lifecycle.affinity import ThreadModel
from aioverbs._lifecycle.lifecycle import ResourceInfo, reap
from aioverbs._lifecycle.resource import HandleResource, Resource, ResourceStatistics
from aioverbs._monitoring.monitor import start_if_enabled
from aioverbs._monitoring.snapshot import register_device
from aioverbs._providers import hardware, software
from aioverbs._providers.peer_log import log_periodically, log_rejections
from aioverbs._providers.software_hosts import resolve_host
from aioverbs._providers.sysfs import kernel_devices
from aioverbs._sharing.shared_pd import check_share
from aioverbs._verbs.async_events import DeviceEvent, EventPump
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.loop_domain import DomainKey, LoopDomain, SharedDomain
from aioverbs._verbs.ports import gid_table
from aioverbs._verbs.protection_domain import InterchangeableDomain, ProtectionDomain
from aioverbs._verbs.resource_domain import ResourceDomain
from aioverbs._verbs.thread_domain import ThreadDomain, ThreadDomainBudget
from aioverbs._verbs.xrc_domain import XrcDomain
from aioverbs.allocators import Allocator
from aioverbs.attributes import DeviceAttributes, Execution, PortAttributes
from aioverbs.errors import DeviceNotFoundError, VerbsError
from aioverbs.gid_selection import select_gid_index
from aioverbs.software_peers import Peer, RejectedPeer
from aioverbs.types import LinkLayer, Mtu, PortState

if TYPE_CHECKING:
    from pyverbs.device import Context as PyverbsContext
    from pyverbs.pd import PD


__all__ = [
    "Device",
    "DeviceInfo",
    "DeviceStatistics",
    "PortInfo",
    "default_name",
    "devices",
    "open_arguments",
    "open_device",
]

logger = logging.getLogger("aioverbs")


@dataclass(frozen=True)
class PortInfo:
    """A port of a device, as `devices` found it.

    :param number: port number, from 1.
    :param state: state of the port.
    :param link_layer: InfiniBand or Ethernet.
    :param active_mtu: MTU in use; `Mtu.NONE` if the port has none.
    :param gids: GIDs of the port: pairs of an index in the GID table and the GID as the text of an IPv6 address.
    :param gid_index: index of the GID that queue pairs send from by default; None if the port has no GID.
    """

    number: int
    state: PortState
    link_layer: LinkLayer
    active_mtu: Mtu
    gids: tuple[tuple[int, str], ...]
    gid_index: int | None = None


@dataclass(frozen=True)
class DeviceInfo:
    """A device of this machine, as `devices` found it.

    :param name: name that `open_device` takes.
    :param provider: ``"software"`` or ``"hardware"``.
    :param ports: ports of the device; empty if it cannot be used.
    :param native: the subset of ``"thread domains"``, ``"parent domains"`` and ``"XRC domains"`` that the provider
        implements.
    :param problem: message of the exception that opening or querying the device raised; None if there was none.
    """

    name: str
    provider: str
    ports: tuple[PortInfo, ...]
    native: frozenset[str]
    problem: str | None = None

    @property
    def active(self) -> bool:
        """Whether at least one port of the device is in the state ACTIVE."""
        return any(port.state is PortState.ACTIVE for port in self.ports)


@dataclass(frozen=True)
class DeviceStatistics(ResourceStatistics):
    """Counts of a device's open objects, native thread domains and rejected calls, from `Device.statistics`.

    :param native_thread_domains: number of native thread domains in use.
    :param objects: pairs of an object type and the number of open objects of that type; empty for an RDMA device.
    :param overlaps: number of calls rejected because another thread was already inside the same single-threaded object;
        0 for an RDMA device.
    """

    native_thread_domains: int
    objects: tuple[tuple[str, int], ...]
    overlaps: int


def devices() -> list[DeviceInfo]:
    """Return a list of the devices of this machine: RDMA devices first, the software device last.

    Each device is opened briefly to query it. If a device cannot be opened, its `DeviceInfo.problem` is the message of
    the exception. Among these are the devices that only the kernel knows: all RDMA devices if libibverbs is missing or
    if the verb that lists them fails, otherwise those for which libibverbs has no provider or finds no device file.

    :returns: a `DeviceInfo` for each device.
    :raises VerbsError: the names of the devices cannot be read, for example because no descriptor is left (EMFILE), or
        a device could be opened but not closed again.
    """
    try:
        names = hardware.names()
    except OSError:  # opening each of the devices tells the reason
        names = kernel_devices()
    return [_query_info(name) for name in (*names, *software.names())]


def _provider_of(name: str) -> str:
    """Return ``"software"`` or ``"hardware"``, judging a device by its name; the device need not exist."""
    return "software" if software.is_software(name) else "hardware"


def _open_context(name: str, *, execution: Execution = "inline", delay_ns: int = 0) -> handles.Context:
    """Open a software or RDMA device by its name.

    :returns: the open context, which the caller must destroy.
    :raises DeviceNotFoundError: there is no device with that name.
    :raises ValueError: `execution` or `delay_ns` is invalid or was given for an RDMA device; or the address in the name
        of a software device, or an environment variable of the software device, is invalid.
    :raises LibraryNotFoundError: the device is an RDMA device, and libibverbs is missing.
    :raises VerbsError: the RDMA devices cannot be listed, ``ibv_open_device`` failed, or a software device cannot
        accept connections at its address.
    """
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


def _query_info(name: str) -> DeviceInfo:
    """Open a device briefly to query it.

    :returns: a `DeviceInfo`. If the device cannot be opened or queried, the `DeviceInfo` has no ports, and its
        ``problem`` is the message of the exception.
    :raises VerbsError: the device could be opened but not closed again.
    """
    try:
        context = _open_context(name)
    except (OSError, DeviceNotFoundError, ValueError) as error:  # NotFound: removed after being listed
        return DeviceInfo(name, _provider_of(name), (), frozenset(), str(error))
    try:
        ports = tuple(_port_info(context, number + 1) for number in range(context.attributes.phys_port_cnt))
        return DeviceInfo(context.name, _provider_of(name), ports, frozenset(_native_types(context)))
    except OSError as error:  # for example, removed after being opened
        return DeviceInfo(name, _provider_of(name), (), frozenset(), str(error))
    finally:
        context.destroy()


def _port_info(context: handles.Context, number: int) -> PortInfo:
    """Query a port and its GID table, and return the results as a `PortInfo`.

    :raises VerbsError: the port cannot be queried.
    """
    port = context.query_port(number)
    gids = gid_table(context, number)
    readable = tuple((each.index, str(ipaddress.IPv6Address(each.gid))) for each in gids)
    return PortInfo(number, port.state, port.link_layer, port.active_mtu, readable, select_gid_index(gids))


def _native_types(context: handles.Context) -> list[str]:
    """Return a list of the optional object types that the provider implements, as named in `DeviceInfo.native`.

    To find out, one object of each type is created and destroyed again.

    :raises VerbsError: an object that was created cannot be destroyed.
    """
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
    """A device: ``ibv_open_device``. Any event loop may use it. Made by `open_device`, which lists the exceptions that
    opening raises.

    A device that is garbage collected while open is closed by the event loop that opened it. If that loop is closed, or
    if no asyncio event loop was running, the device is closed when another device is opened on an asyncio event loop.
    """

    def __init__(
        self, name: str | None, max_native_thread_domains: int | None, execution: Execution, delay_ns: int
    ) -> None:
        super().__init__()
        self._name = name
        self._chosen: str | None = None  # while `open` runs: the name, if it had to be known before
        self._execution = execution
        self._delay_ns = delay_ns
        self._budget = ThreadDomainBudget(max_native_thread_domains)
        self._user_context: PyverbsContext | None = None  # pyverbs context owned by the user
        self._loop_domains: dict[DomainKey, SharedDomain] = {}

    @staticmethod
    def from_pyverbs(context: "PyverbsContext", *, max_native_thread_domains: int | None = None) -> "Device":
        """Return an unopened device that uses an open pyverbs context, which the user continues to own.

        Close this device before the pyverbs context: libibverbs requires that everything made from a context is
        destroyed first, and pyverbs does not know about objects made by this library. If the user closes the context
        first, every use of the device and of its resources raises `BorrowedObjectClosedError`; they can then only be
        closed, which emits a ResourceWarning. Use `adopt_protection_domain` and `ProtectionDomain.adopt_memory_region`
        to adopt protection domains and memory regions of the context.

        While a completion queue of the device is open or `events` is iterated, the asynchronous events of the context
        are taken and acknowledged here, also those of objects that the user made, and its descriptor of events is
        non-blocking: the user must not wait for events of the context then.

        :param context: an open `pyverbs.device.Context`.
        :param max_native_thread_domains: as for `open_device`.
        :returns: the device, to be opened with ``async with`` or `Device.open`.
        :raises ValueError: `max_native_thread_domains` is negative; on opening: `context` is closed.
        :raises TypeError: on opening: `context` is not a `pyverbs.device.Context`.
        :raises LibraryNotFoundError: on opening: libibverbs is missing.
        :raises RuntimeError: on opening: this version of pyverbs has an unknown object layout.
        """
        device = Device(None, max_native_thread_domains, "inline", 0)
        device._user_context = context
        return device

    def _make_context(self) -> handles.Context:
        """Open the context of the device, or adopt the user's pyverbs context.

        This raises the exceptions that `open_device` and `from_pyverbs` list for opening.

        :returns: the context, which the caller must destroy.
        """
        if self._user_context is not None:
            return hardware.adopt_context(self._user_context)
        name = self._chosen or self._name or default_name()
        return _open_context(name, execution=self._execution, delay_ns=self._delay_ns)

    def _open(self) -> None:
        context = self._make_context()
        self._handle = context
        self._lifecycle.hold(context)
        self._lifecycle.label = context.name
        self._pump = EventPump.of(context)
        self._pump.find = self._lifecycle.find
        # The drain callback must not refer to the device itself, or the device could never be garbage collected.
        self._lifecycle.drain = functools.partial(_drain, context, self._pump)
        log_periodically(context)
        with contextlib.suppress(RuntimeError):  # no asyncio loop is running, for example in a trio task
            self._lifecycle.opener = asyncio.get_running_loop()
        if self._lifecycle.opener is not None:
            reap()
        register_device(self)
        start_if_enabled()

    async def open(self) -> Self:
        """Open the device, as ``async with`` does. A host name in its name is resolved in a thread.

        `open_device` lists the exceptions that opening raises, in addition to those of `Resource.open`. On failure, the
        device stays unopened.

        :returns: the device itself.
        """
        host = software.unresolved_host(self._name or os.environ.get("AIOVERBS_DEVICE"))
        try:
            if host is not None and self._user_context is None:
                self._chosen = self._name or default_name()
                if software.is_software(self._chosen):
                    await anyio.to_thread.run_sync(resolve_host, host)
            return await super().open()
        finally:
            self._chosen = None  # a further attempt chooses again

    def _check_open(self) -> None:
        """Check that the device is open, and that the user has not closed the pyverbs context that it uses, if any.

        :raises ClosedResourceError: the device is not open.
        :raises BorrowedObjectClosedError: the user closed the pyverbs context.
        """
        super()._check_open()
        if self._user_context is not None:
            assert self._handle is not None
            # Reading the pointer raises if the user closed the context, and with it the descriptor of its events.
            self._handle.verbs_pointer  # noqa: B018

    @property
    def name(self) -> str:
        """Name of the device, such as ``"mlx5_0"``, ``"soft0"`` or ``"soft0@10.0.0.1:7470"``.

        :raises ClosedResourceError: the device is not open.
        """
        return self.handle.name

    @property
    def software(self) -> bool:
        """Whether this is a software device, not an RDMA device.

        :raises ClosedResourceError: the device is not open.
        """
        return self.handle.software

    @property
    def faults(self) -> FaultPlan:
        """Fault plan of this software device, through which tests inject failures.

        The plan injects failures: verbs and work requests that fail, messages that are lost or delayed, a port that
        goes down, a device that is lost. Its methods expect the `handle` of a queue pair, not the queue pair itself.

        :raises ValueError: this is an RDMA device.
        :raises ClosedResourceError: the device is not open.
        """
        context = self.handle
        if not isinstance(context, SoftwareContext):
            raise ValueError(f"{context!r} is an RDMA device: only a software device has a fault plan")
        return context.faults

    def attributes(self) -> DeviceAttributes:
        """Query the device (``ibv_query_device``) and return its attributes and limits as a `DeviceAttributes`.

        :raises ClosedResourceError: the device is not open.
        :raises VerbsError: the verb failed.
        """
        return self.handle.query_device()

    def port(self, number: int = 1) -> PortAttributes:
        """Query a port (``ibv_query_port``) and return its current attributes as a `PortAttributes`.

        :param number: port number, from 1.
        :raises VerbsError: the verb failed, for example because the device has no such port.
        :raises ValueError: `number` is not in 0..255.
        :raises ClosedResourceError: the device is not open.
        """
        return self.handle.query_port(number)

    def protection_domain(self) -> ProtectionDomain:
        """Return a new protection domain, to be opened: see `ProtectionDomain`.

        :raises ClosedResourceError: the device is not open.
        :raises VerbsError: on opening: ``ibv_alloc_pd`` failed.
        """
        return ProtectionDomain(self, self.handle, self._budget)

    def adopt_protection_domain(self, pd: "PD") -> ProtectionDomain:
        """Return a protection domain over a pyverbs ``PD`` of the context that `from_pyverbs` adopted, to be opened.

        The user continues to own the ``PD`` and must close it after this protection domain. While a resource made from
        this protection domain is open, closing the ``PD`` fails with EBUSY. Once the ``PD`` is closed, every use of
        this protection domain raises `BorrowedObjectClosedError`. Adopt memory that the user registered on the ``PD``
        with `ProtectionDomain.adopt_memory_region`.

        :param pd: an open `pyverbs.pd.PD`.
        :raises TypeError: on opening: `pd` is not a ``PD``, or is a parent domain.
        :raises ValueError: on opening: `pd` is closed or belongs to another context.
        :raises ClosedResourceError: the device is not open.
        """
        return ProtectionDomain(self, self.handle, self._budget, lent=pd)

    def shared_protection_domain(self, shared_id: int, share_key: int) -> ProtectionDomain:
        """Return an unopened instance of a protection domain that is shared under an id (``ibv_share_pd``).

        On a software device, the instance can be opened if any context of the device in this process shares the domain.
        On an RDMA device, it can be opened if the context of this device shares the domain. In addition, a device made
        by `import_device` can open the domain whose id was passed to `import_device`.

        :param shared_id: `SharedProtectionDomain.id`, 0..2**96-1.
        :param share_key: the key with which the domain was shared, 0..2**64-1.
        :raises VerbsError: on opening: with ENOENT if this device cannot open a domain with that id, as described
            above, or if the sharing or the domain has ended; with EACCES if the key is wrong; with EXDEV if the id
            belongs to another device; with EOPNOTSUPP if the provider does not implement the verb; with EPROTO if
            another process has a lease on the file of the domain, or the file is invalid; on a software device, with
            EMFILE or ENOMEM if 240 processes already use the domain or its memory cannot be mapped.
        :raises OSError: on opening on an RDMA device: with EMFILE if no file descriptor is left.
        :raises ValueError: `shared_id` does not fit in 96 bits, or `share_key` does not fit in 64 bits.
        :raises TypeError: `shared_id` or `share_key` is not an integer.
        :raises ClosedResourceError: the device is not open.
        """
        check_share(shared_id, share_key)
        return ProtectionDomain(self, self.handle, self._budget, (shared_id, share_key))

    def thread_domain(self, *, require_native: bool = False) -> ThreadDomain:
        """Return a new thread domain, to be opened: see `ThreadDomain`. The event loop that opens the domain owns it.

        :param require_native: True if opening must raise `VerbsError` when the provider has no thread domains left;
            False to open a non-native thread domain in this case.
        :raises ClosedResourceError: the device is not open.
        :raises RuntimeError: on opening: no asyncio event loop is running.
        :raises VerbsError: on opening: the verb failed; with `require_native`, also if no thread domains are left.
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
        """Return a new resource domain, to be opened: see `ResourceDomain`.

        :param pd: protection domain to build on; None to build on a new one.
        :param thread_model: rule for the threads that may use the domain.
        :param message_model: how awaits on the completion queues of the domain wait.
        :param allocator: allocator of the memory of queues; None for the provider's own.
        :param context: opaque user data, passed to the allocator.
        :param require_native: True if opening must raise `VerbsError` when the thread domain or parent domain would not
            be native.
        :raises TypeError: `pd` is not a protection domain or one interchangeable with it, or `allocator` lacks the
            methods of `Allocator`.
        :raises ClosedResourceError: the device is not open; on opening: `pd` is not open.
        :raises RuntimeError: on opening with the thread model SINGLE: no asyncio event loop is running.
        :raises ValueError: `pd` belongs to another device.
        :raises VerbsError: on opening: a verb failed, or `require_native` cannot be met.
        """
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

    def loop_domain(
        self, *, message_model: MessageModel = MessageModel.DEFAULT, allocator: Allocator | None = None
    ) -> AbstractAsyncContextManager[ResourceDomain, None]:
        """Return an async context manager for the resource domain that all blocks of this device on one loop share.

        ``async with`` yields the open `ResourceDomain`. Blocks share a domain if they are on the same loop and have the
        same message model and the same allocator object; the settings of a domain are always those of all its blocks.
        The first block to be entered opens the domain, and the last one to be left closes it. If the loop is closed
        before that, the next block of the device, on any loop, has the domain closed in the background, with a
        `ResourceWarning` for what was left open. If closing fails, the exception of `Resource.aclose` is added as a
        note to the exception of the block, or is raised if there is none; the next block then opens a new domain.

        :param message_model: how awaits on the completion queues of the domain wait.
        :param allocator: allocator of the memory of queues; None for the provider's own.
        :returns: the context manager; except for those about the parameters, the exceptions below are raised on
            entering or leaving its block.
        :raises ValueError: `message_model` is not a `MessageModel`.
        :raises TypeError: `allocator` lacks the methods of `Allocator`.
        :raises AffinityError: on entering: a block on another loop is using the context manager; on leaving: the block
            was entered on another loop. In both cases nothing was done.
        :raises RuntimeError: on entering: no asyncio event loop is running, or the context manager is already in use.
        :raises ClosedResourceError: on entering: the device is not open.
        :raises VerbsError: on entering: the domain cannot be opened; on leaving: the domain cannot be closed.
        """
        return LoopDomain(self.resource_domain, self._loop_domains, message_model, allocator)

    def xrc_domain(self, fd: int = -1, oflag: int = os.O_CREAT) -> XrcDomain:
        """Return an XRC domain, to be opened: see `XrcDomain`.

        :param fd: file descriptor of the inode that identifies the domain; -1 for a domain without an inode, which no
            other process can open.
        :param oflag: ``os.O_CREAT``, optionally with ``os.O_EXCL``; or 0 to open an existing domain only.
        :raises ClosedResourceError: the device is not open.
        :raises VerbsError: on opening: the verb failed, with the error numbers that `XrcDomain` lists.
        """
        return XrcDomain(self, self.handle, fd, oflag)

    def events(self, resource: Resource | None = None) -> AsyncGenerator[DeviceEvent, None]:
        """Return an iterator over asynchronous events (``ibv_get_async_event``) of the device and of all resources made
        from it.

        The iteration ends when the device is closed. While there is no listener, the latest 1,024 events are queued for
        the next one. The event loop that requests the first event owns the iterator.

        :param resource: queue pair, completion queue or shared receive queue whose events to yield, as its method
            `events` does; the iteration then ends when the resource is closed. None to yield all events.
        :returns: an asynchronous iterator of `DeviceEvent`.
        :raises ClosedResourceError: the device is not open.
        :raises AffinityError: during iteration: another event loop owns the iterator; nothing was done.
        :raises ForkedProcessError: during iteration: the device was opened before a fork, in the parent process.
        :raises RuntimeError: during iteration: no asyncio event loop is running.
        :raises OSError: during iteration: the process has no file descriptors left.
        """
        self._check_open()
        return self._pump.listen(resource)

    def resources(self) -> ResourceInfo:
        """Return a snapshot of the tree of all resources made from this device, as a `ResourceInfo` of the device.

        The library Rich prints the snapshot as a tree. The device need not be open.
        """
        return self._lifecycle.info()

    def peers(self) -> tuple[Peer, ...]:
        """Return the network streams of the software device between this process and other processes.

        The streams of all contexts of the software device in this process are included. New rejections of peers are
        logged, as described in `refusals`.

        :returns: a `Peer` for each stream; an empty tuple for an RDMA device.
        :raises ClosedResourceError: the device is not open.
        """
        return log_rejections(context).peers if isinstance(context := self.handle, SoftwareContext) else ()

    def refusals(self) -> tuple[RejectedPeer, ...]:
        """Return the peers that the software device most recently rejected, or disconnected because of invalid data.

        Each rejection is also logged once, as a warning by the logger ``aioverbs.fabric``. An event loop that uses the
        device logs new rejections about once a second; calling this method or `peers` or closing the device logs them
        immediately.

        :returns: a `RejectedPeer` with time, GID and reason for each rejection, oldest first; an empty tuple for an
            RDMA device, which reports none.
        :raises ClosedResourceError: the device is not open.
        """
        return log_rejections(context).refusals if isinstance(context := self.handle, SoftwareContext) else ()

    def statistics(self) -> DeviceStatistics:
        """Return a `DeviceStatistics`: how many resources made from the device are open, how many native thread domains
        are in use, and, for a software device, how many objects of each type are open and how many calls were rejected
        so far because they overlapped with another one.

        For an RDMA device, `DeviceStatistics.objects` is empty and `DeviceStatistics.overlaps` is 0.

        :raises ClosedResourceError: the device is not open.
        """
        counts = dict(context.counts()) if isinstance(context := self.handle, SoftwareContext) else {}
        overlaps = counts.pop("overlaps", 0)
        assert isinstance(overlaps, int)
        objects = tuple((kind, count) for kind, count in counts.items() if isinstance(count, int))
        return DeviceStatistics(len(self._lifecycle.children), self._budget.used, objects, overlaps)


async def _drain(context: handles.Context, pump: EventPump) -> None:
    """Log rejections of peers that were not logged yet, and end all iterations over events.

    Closing a device awaits this first. Only software devices with an address reject peers.
    """
    if isinstance(context, SoftwareContext) and context.has_fabric:
        log_rejections(context)
    await pump.drain()


def open_device(
    name: str | None = None,
    *,
    max_native_thread_domains: int | None = None,
    execution: Execution = "inline",
    delay_ns: int = 0,
) -> Device:
    """Return a `Device`, to be opened with ``async with`` or `Device.open`.

    :param name: name of the device. None for the name in the environment variable AIOVERBS_DEVICE; if that is not set,
        for the first RDMA device with an active port; if there is none, for the software device. The logger
        ``aioverbs`` says so, as a warning if there is an RDMA device that cannot be used. A software device that other
        hosts connect to has its address and TCP port in its name: ``"soft0@10.0.0.1:7470"`` or
        ``"soft0@[fd00::1]:7470"``, or a host name of this host in place of the address. With an IPv4 address, port 0
        stands for one that the system chooses: `Device.name` contains it, and endpoints and connections tell it to
        peers. The default is 7470. If the environment variable AIOVERBS_SOFT_ADDRESS is set, ``"soft0"`` stands for the
        device with that address. Each address is a separate device; in one process, port 0 always stands for the same
        device of an address.
    :param max_native_thread_domains: maximum number of native thread domains in use at once; further thread domains
        are opened as non-native ones. None for as many as the device has.
    :param execution: for the software device only: ``"inline"`` executes a work request in the call that posts it;
        ``"thread"`` executes it in a thread of the device, concurrently with the event loop, as hardware does.
    :param delay_ns: with ``"thread"`` only: minimum time from posting to execution, in nanoseconds.
    :raises DeviceNotFoundError: on opening: there is no device with that name.
    :raises LibraryNotFoundError: on opening: an RDMA device is named, and libibverbs is missing.
    :raises ValueError: `max_native_thread_domains` is negative. On opening: `execution` or `delay_ns` is invalid or was
        given for an RDMA device; or the address in the name of a software device, or an environment variable of the
        software device, is invalid.
    :raises VerbsError: on opening: ``ibv_open_device`` failed; or a software device cannot accept connections at its
        address, for example with EADDRINUSE, or its host name cannot be resolved; or, while looking for an active port,
        no descriptor was left (EMFILE).
    """
    return Device(name, max_native_thread_domains, execution, delay_ns)


def default_name() -> str:
    """Return the name of the device that `open_device` opens if no name is given.

    :raises VerbsError: no descriptor is left (EMFILE).
    """
    return os.environ.get("AIOVERBS_DEVICE") or _first_active()


def _first_active() -> str:
    """Return the name of the first RDMA device with an active port.

    If there is none, return the name of the software device. If there is a device that cannot be used, log a warning
    that says why; a machine without RDMA devices is nothing to warn of, so the message is informational then.

    :raises VerbsError: no descriptor is left (EMFILE).
    """
    reasons = []
    try:
        names = hardware.names()
    except OSError as error:
        names = []
        if kernel_devices():  # without a kernel device, installing the libraries would not help
            reasons.append(str(error))
    for name in names:
        try:
            if _has_active_port(name):
                return name
            reasons.append(f"no port of {name} is active")
        except (OSError, DeviceNotFoundError) as error:  # NotFound: removed after being listed
            reasons.append(f"{name} cannot be used: {error}")
    (fallback,) = software.names()
    level = logging.WARNING if reasons else logging.INFO
    logger.log(level, "opening the software device %s: %s", fallback, "; ".join(reasons) or "there is no RDMA device")
    return fallback


def _has_active_port(name: str) -> bool:
    """Open an RDMA device briefly, and return whether at least one of its ports is in the state ACTIVE.

    :raises VerbsError: the device cannot be opened, queried or closed again.
    :raises DeviceNotFoundError: there is no device with that name.
    """
    context = _open_context(name)
    try:
        numbers = range(1, context.attributes.phys_port_cnt + 1)
        return any(context.query_port(number).state is PortState.ACTIVE for number in numbers)
    finally:
        context.destroy()


def open_arguments(device: Device) -> tuple[Execution, int, int | None]:
    """Return a tuple of the ``execution``, ``delay_ns`` and ``max_native_thread_domains`` that a device was made with.

    Other packages in the library use them to open the same device again.
    """
    return device._execution, device._delay_ns, device._budget.limit


publish(__name__)
