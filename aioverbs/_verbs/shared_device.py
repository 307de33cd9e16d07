"""The devices that all code in a process shares, each opened once and closed when the process ends."""

import asyncio
import atexit
import contextlib
import os
import threading
import weakref

from aioverbs._exports import publish
from aioverbs._lifecycle.lifecycle import ResourceState
from aioverbs._lifecycle.resource import lifecycle_of, open_now
from aioverbs._providers import software
from aioverbs._verbs.async_events import EventPump
from aioverbs._verbs.device import Device, default_name, open_device
from aioverbs.errors import BusyResourceError, ClosedResourceError

__all__ = ["shared_device"]

_lock = threading.RLock()  # reentrant: a signal handler may ask for a device in the middle of a section
_devices: dict[str, Device] = {}  # by the name that was asked for
_default: Device | None = None


def _reset_lock() -> None:
    """Replace the lock of this module. This is called in the child of a fork."""
    global _lock
    _lock = threading.RLock()  # the holder of the lock does not exist in the child


os.register_at_fork(after_in_child=_reset_lock)


def shared_device(name: str | None = None) -> Device:
    """Return the open device that all code in this process shares.

    The first call opens the device; later calls return the same object, on any thread and event loop, and need no loop.
    So several libraries in a process have one device without knowing of each other, and each makes its own domains from
    it, for example with `Device.loop_domain`. The device stays open until the process ends, which closes it. A forked
    child gets a device of its own from its first call.

    The call that opens the device does so in its own thread, and resolves a host name there; other calls wait for it.
    Where that may take long, call ``await asyncio.to_thread(shared_device)`` first.

    Use the device as it is, without ``async with`` and without closing it. If it is closed nevertheless, it is closed
    for all code in the process, and the next call opens another one. So does the next call after the device was lost
    (DEVICE_FATAL), for example because its NIC was reset; the lost one is closed once nothing refers to it, or when
    the process ends.

    :param name: name of the device, as for `open_device`. None for the device of the first call with None, which
        chooses as `open_device` does; if that device is closed or lost, the next one chooses again. Names of the same
        device, such as ``"soft0"`` and the name with the address in AIOVERBS_SOFT_ADDRESS, return the same object.
    :returns: the open device.
    :raises DeviceNotFoundError: there is no device with that name.
    :raises LibraryNotFoundError: an RDMA device is named, and libibverbs is missing.
    :raises ValueError: the address in the name of a software device, or an environment variable of the software device,
        is invalid.
    :raises VerbsError: the device cannot be opened, or, while one is chosen, cannot be queried.
    """
    global _default
    with _lock:
        if name is None and _default is not None and _is_usable(_default):
            return _default
        device = _get(name or default_name())
        if name is None:
            _default = device
        return device


def _get(name: str) -> Device:
    """Return the shared device with a name, and open one if there is none that can be used. Call with the lock.

    :raises VerbsError: the device cannot be opened; the other exceptions of `shared_device` are raised as well.
    """
    name = software.full_name(name) if software.is_software(name) else name
    for asked, known in tuple(_devices.items()):
        if _is_usable(known) and name in (asked, known.name):  # these differ if the system chose the TCP port
            return known
    _devices.pop(name, None)
    device = open_device(name)
    open_now(device)
    lifecycle_of(device).may_be_dropped = True  # if another one replaces it
    atexit.register(_close_at_exit, weakref.ref(device))
    return _devices.setdefault(name, device)  # a signal handler may have made a call meanwhile, and got another one


def _is_usable(device: Device) -> bool:
    """Return whether a device is open and not lost; False in the child of a fork for a device of the parent."""
    try:
        return not EventPump.of(device.handle).is_lost()
    except ClosedResourceError:
        return False


def _close_at_exit(reference: "weakref.ref[Device]") -> None:
    """Close a shared device of this process. Python calls this when it ends, after all threads but daemons have.

    The device needs no event loop of its own, but resources that are still open on it may: those of closed loops and
    ended threads are closed on a new loop. A device that another event loop still uses, such as one in a daemon thread,
    stays open.

    :param reference: the device, unless it was dropped after another one had replaced it.
    :raises VerbsError: a verb failed. Python reports it, and goes on with the other devices.
    """
    device = reference()
    if device is not None and device.state is ResourceState.OPEN and not device.closed:
        with contextlib.suppress(BusyResourceError):  # the provider stops its threads before memory is freed
            asyncio.run(device.aclose())


publish(__name__)
