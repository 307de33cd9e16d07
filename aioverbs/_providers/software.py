"""The software devices: a verbs provider in this process, available on every machine."""

import os

from aioverbs._core.handles import handles
from aioverbs._core.software.software import Context
from aioverbs._providers.software_names import is_software, parse_name
from aioverbs._providers.software_settings import SoftSettings
from aioverbs.attributes import Execution
from aioverbs.errors import DeviceNotFoundError
from aioverbs.gid_selection import Gid
from aioverbs.types import GidType

__all__ = ["gid_table", "is_software", "names", "open_context"]

_NAME = "soft0"


def names() -> list[str]:
    """Return a list with the name of the only software device that exists by default; each address adds another
    device."""
    return [_NAME]


def open_context(name: str = _NAME, *, execution: Execution = "inline", delay_ns: int = 0) -> Context:
    """Open a software device.

    :param name: ``"soft0"`` for the device with the address in the environment variable AIOVERBS_SOFT_ADDRESS, or
        without an address if that is not set; or a name with an address, such as ``"soft0@10.0.0.1:7470"``.
    :param execution: ``"inline"`` to execute a request in the call that posts it, ``"thread"`` to execute it in a
        thread of the device.
    :param delay_ns: minimum time from posting to execution, in nanoseconds; only with ``"thread"``.
    :returns: the open context, which the caller destroys.
    :raises DeviceNotFoundError: `name` is not the name of a software device.
    :raises ValueError: the address, an environment variable (see `SoftSettings`), `execution` or `delay_ns` is invalid.
    :raises OverflowError: `delay_ns` is 2**64 or more.
    :raises VerbsError: the device cannot be opened, or cannot accept connections at its address; the error says why.
    """
    if not is_software(name):
        raise DeviceNotFoundError(name, names())
    settings = SoftSettings.read(os.environ, os.geteuid())
    address = parse_name(name) or settings.address
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
