"""The software devices: a verbs provider in this process, available on every machine."""

import contextlib
import os

from aioverbs._core.handles import handles
from aioverbs._core.software.software import Context
from aioverbs._providers.software_hosts import is_resolved, resolve_host
from aioverbs._providers.software_names import SoftAddress, SoftHost, is_software, parse_name
from aioverbs._providers.software_settings import SoftSettings
from aioverbs.attributes import Execution
from aioverbs.errors import DeviceNotFoundError
from aioverbs.gid_selection import Gid
from aioverbs.types import GidType

__all__ = ["full_name", "gid_table", "is_software", "names", "open_context", "unresolved_host"]

_NAME = "soft0"


def names() -> list[str]:
    """Return a list with the name of the only software device that exists by default; each address adds another
    device."""
    return [_NAME]


def full_name(name: str) -> str:
    """Return the name of a software device with its address, if it has one.

    :param name: name of a software device; ``"soft0"`` stands for the device with the address in the environment
        variable AIOVERBS_SOFT_ADDRESS.
    :raises ValueError: the address or an environment variable is invalid.
    :raises VerbsError: a host name cannot be resolved.
    """
    address = _address_in(name, SoftSettings.read(os.environ, os.geteuid()))
    return name if address is None else address.name


def unresolved_host(name: str | None) -> SoftHost | None:
    """Return the host name that opening a device would have to resolve; None if there is none.

    :param name: name of the device; None if that is not known yet.
    """
    if name is not None and not is_software(name):
        return None
    with contextlib.suppress(ValueError):  # opening the device raises it, if it is a software device
        found = parse_name(name or _NAME) or SoftSettings.read(os.environ, os.geteuid()).address
        return found if isinstance(found, SoftHost) and not is_resolved(found) else None
    return None


def _address_in(name: str, settings: SoftSettings) -> SoftAddress | None:
    """Return the address that a name or the settings give a software device; None if they give none.

    :raises ValueError: the name is invalid.
    :raises VerbsError: a host name cannot be resolved.
    """
    found = parse_name(name) or settings.address
    return resolve_host(found) if isinstance(found, SoftHost) else found


def open_context(name: str = _NAME, *, execution: Execution = "inline", delay_ns: int = 0) -> Context:
    """Open a software device.

    :param name: ``"soft0"`` for the device with the address in the environment variable AIOVERBS_SOFT_ADDRESS, or
        without an address if that is not set; or a name with an address or host name, such as
        ``"soft0@10.0.0.1:7470"``. With port 0, the device keeps the port that the system chose for it as long as this
        process exists.
    :param execution: ``"inline"`` to execute a request in the call that posts it, ``"thread"`` to execute it in a
        thread of the device.
    :param delay_ns: minimum time from posting to execution, in nanoseconds; only with ``"thread"``.
    :returns: the open context, which the caller destroys.
    :raises DeviceNotFoundError: `name` is not the name of a software device.
    :raises ValueError: the address, an environment variable (see `SoftSettings`), `execution` or `delay_ns` is invalid.
    :raises OverflowError: `delay_ns` is 2**64 or more.
    :raises VerbsError: the device cannot be opened, its host name cannot be resolved, or it cannot accept connections
        at its address; the error says why.
    """
    if not is_software(name):
        raise DeviceNotFoundError(name, names())
    settings = SoftSettings.read(os.environ, os.geteuid())
    address = _address_in(name, settings)
    where = None if address is None else (address.host.packed, address.port)
    return Context.open(execution=execution, delay_ns=delay_ns, address=where, settings=settings)


def gid_table(context: handles.Context, port: int) -> list[Gid]:
    """Return the GID table of a port, a list of `Gid` in the order of their indexes. All have the type RoCE v2.

    :param context: context of a software device.
    :param port: number of a port that the device has.
    :raises VerbsError: the port cannot be queried.
    :raises ClosedResourceError: the context is closed.
    """
    length = context.query_port(port).gid_tbl_len
    return [Gid(index, context.query_gid(port, index), GidType.ROCE_V2) for index in range(length)]
