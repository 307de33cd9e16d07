"""Reports about devices: open a device, and try each feature on it."""

import contextlib
import errno
import ipaddress
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field

from aioverbs._providers import hardware, software
from aioverbs._providers.sysfs import kernel_devices
from aioverbs._verbs.capability_checks import has_windows
from aioverbs._verbs.completion_queue import MessageModel
from aioverbs._verbs.device import Device, open_device
from aioverbs._verbs.ports import gid_table
from aioverbs.allocators import ArenaAllocator
from aioverbs.errors import DeviceNotFoundError, LibraryNotFoundError, VerbsError
from aioverbs.gid_selection import select_gid_index
from aioverbs.types import PortState

__all__ = ["FEATURES", "DeviceReport", "GidReport", "PortReport", "inspect_device", "list_devices"]

# Optional features: name in JSON, name in text.
FEATURES = {
    "thread_domains": "thread domains",
    "parent_domains": "parent domains",
    "allocators": "allocators",
    "xrc_domains": "XRC domains",
    "shared_protection_domains": "shared PDs",
    "memory_windows": "memory windows",
    "cq_moderation": "CQ moderation",
}
# Errors that mean "unsupported". Some providers fail with EINVAL for attributes they do not know.
_UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@dataclass(frozen=True)
class GidReport:
    """A GID of a port.

    :param index: index in the port's GID table.
    :param address: the GID as an IPv6 address.
    :param type: name of the GID type, such as ``"ROCE_V2"``.
    :param preferred: whether aioverbs uses this GID by default.
    """

    index: int
    address: str
    type: str
    preferred: bool


@dataclass(frozen=True)
class PortReport:
    """A port of a device; sizes are in bytes.

    :param number: the port's number, from 1.
    :param state: name of the `PortState`.
    :param link_layer: name of the link layer.
    :param active_mtu: MTU of the link.
    :param max_message: limit of a message's size.
    :param lid: local identifier in an InfiniBand subnet.
    :param gids: the port's GIDs that are set.
    """

    number: int
    state: str
    link_layer: str
    active_mtu: int
    max_message: int
    lid: int
    gids: tuple[GidReport, ...]


@dataclass(frozen=True)
class DeviceReport:
    """A device. Made by `inspect_device`.

    :param name: the device's name.
    :param provider: ``"software"`` or ``"hardware"``.
    :param problem: reason why the device cannot be opened or used, None if it can; unknown fields keep their defaults.
    :param active: whether a port is active.
    :param firmware: firmware version.
    :param node_guid: the device's GUID, as hexadecimal groups.
    :param vendor_id: the vendor's OUI.
    :param vendor_part_id: the vendor's number of the model.
    :param ports: the ports.
    :param native: whether the device implements each of `FEATURES`.
    :param limits: limits reported by ``ibv_query_device``.
    """

    name: str
    provider: str
    problem: str | None = None
    active: bool = False
    firmware: str = ""
    node_guid: str = ""
    vendor_id: int = 0
    vendor_part_id: int = 0
    ports: tuple[PortReport, ...] = ()
    native: dict[str, bool] = field(default_factory=dict)
    limits: dict[str, int | str] = field(default_factory=dict)


def list_devices() -> tuple[list[str], str | None]:
    """List the names of devices, RDMA devices first.

    :returns: the names, and the error message that says why RDMA devices cannot be listed, or None if they can. If they
        cannot, only the names of software devices are returned.
    """
    try:
        return [*hardware.names(), *software.names()], None
    except OSError as error:
        return software.names(), str(error)


async def inspect_device(name: str) -> DeviceReport:
    """Open a device, collect a report about it and close it. Warnings about missing features are not logged.

    :param name: the device's name.
    :returns: the report. If opening or testing the device fails, `DeviceReport.problem` contains the error message.
    :raises DeviceNotFoundError: no device has that name.
    """
    provider = "software" if software.is_software(name) else "hardware"
    try:
        with _suppress_warnings():
            async with open_device(name) as device:
                return await _report(device, provider)
    except DeviceNotFoundError:
        raise
    except LibraryNotFoundError as error:  # only the kernel's list can then tell whether the device exists
        known = kernel_devices()
        if name not in known:
            raise DeviceNotFoundError(name, (*known, *software.names())) from error
        return DeviceReport(name, provider, str(error))
    except (OSError, ValueError) as error:  # ValueError: an invalid setting of the software device
        return DeviceReport(name, provider, str(error))


@contextlib.contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Suppress the library's warnings for the duration of the block, since the report shows the missing features."""
    logger = logging.getLogger("aioverbs")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


async def _report(device: Device, provider: str) -> DeviceReport:
    """Return a report about an open device. If testing the features fails, `DeviceReport.problem` contains the error
    message and `DeviceReport.native` is empty.

    :raises VerbsError: a query of the device or of a port failed.
    """
    attributes = device.attributes()
    ports = tuple(_port(device, number) for number in range(1, attributes.phys_port_cnt + 1))
    limits: dict[str, int | str] = {
        name: value for name, value in asdict(attributes).items() if name.startswith("max_")
    }
    limits["atomic_cap"] = attributes.atomic_cap.name
    problem, native = None, dict[str, bool]()
    try:
        native = await _native_features(device)
    except OSError as error:  # for example, no memory may be locked
        problem = str(error)
    return DeviceReport(
        device.name,
        provider,
        problem,
        any(port.state == PortState.ACTIVE.name for port in ports),
        attributes.fw_ver,
        attributes.node_guid.hex(":", 2),
        attributes.vendor_id,
        attributes.vendor_part_id,
        ports,
        native,
        limits,
    )


def _port(device: Device, number: int) -> PortReport:
    """Return a report about port ``number`` of a device.

    :raises VerbsError: the query of the port failed.
    """
    port = device.port(number)
    table = gid_table(device.handle, number)
    best = select_gid_index(table)
    gids = tuple(GidReport(each.index, _address(each.gid), each.gid_type.name, each.index == best) for each in table)
    mtu = port.active_mtu.size
    return PortReport(number, port.state.name, port.link_layer.name, mtu, port.max_msg_sz, port.lid, gids)


def _address(gid: bytes) -> str:
    """Return a GID as the text of an IPv6 address; a GID that contains an IPv4 address has the form
    ``::ffff:192.0.2.1``.
    """
    address = ipaddress.IPv6Address(gid)
    ipv4 = address.ipv4_mapped
    return f"::ffff:{ipv4}" if ipv4 is not None else str(address)


async def _native_features(device: Device) -> dict[str, bool]:
    """Find out which of `FEATURES` the device implements itself, by creating resources that use them.

    An unsupported feature makes the creation fail, or is emulated by the library; the resource then says so.

    :returns: a dict with a bool for each of `FEATURES`: True if the device implements the feature.
    :raises VerbsError: a resource cannot be created for a reason other than that the device does not support it.
    """
    found = dict.fromkeys(FEATURES, False)
    async with device.thread_domain() as td, device.protection_domain() as pd:
        found["thread_domains"] = td.native
        async with pd.parent_domain() as parent:
            found["parent_domains"] = parent.native
        found["allocators"] = found["parent_domains"] and await _can_open(_with_allocator(device))
        found["xrc_domains"] = await _can_open(device.xrc_domain())
        found["shared_protection_domains"] = await _can_open(pd.share(1))
        found["memory_windows"] = has_windows(device.handle.attributes)
        async with pd.completion_queue(16, message_model=MessageModel.HIGH_BANDWIDTH) as cq:
            found["cq_moderation"] = cq.moderated
    return found


@asynccontextmanager
async def _with_allocator(device: Device) -> AsyncIterator[None]:
    """Open a completion queue whose memory an allocator provides, and close it when the block ends.

    :raises VerbsError: the queue, or a resource that it needs, cannot be created.
    """
    async with (
        device.protection_domain() as pd,
        pd.parent_domain(allocator=ArenaAllocator()) as parent,
        parent.completion_queue(16),  # takes its memory from the allocator
    ):
        yield


async def _can_open(resource: AbstractAsyncContextManager[object]) -> bool:
    """Open and close a resource.

    :returns: True if it could be opened; False if the device does not support it.
    :raises VerbsError: opening failed for another reason.
    """
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(resource)
        except VerbsError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return False
        return True
