"""The software device: a verbs provider in this process, always there."""

from aioverbs._core import engine
from aioverbs.errors import DeviceNotFoundError
from aioverbs.gids import Gid
from aioverbs.types import GidType

__all__ = ["gid_table", "names", "open_context"]

_NAME = "soft0"


def names() -> list[str]:
    """The software devices."""
    return [_NAME]


def open_context(name: str = _NAME, *, engine_mode: bool = False, delay_ns: int = 0) -> engine.Context:
    """Open the software device.

    :param engine_mode: a C thread executes requests, as hardware does; otherwise the call that posts one does.
    :param delay_ns: in engine mode, how long after its posting a request is executed at the earliest.
    :raises DeviceNotFoundError: there is no such software device.
    """
    if name != _NAME:
        raise DeviceNotFoundError(name, names())
    return engine.Context.open_software(engine=engine_mode, delay_ns=delay_ns)


def gid_table(context: engine.Context, port: int) -> list[Gid]:
    """The GIDs of a port; they are as those of RoCE v2."""
    length = context.query_port(port).gid_tbl_len
    return [Gid(index, context.query_gid(port, index), GidType.ROCE_V2) for index in range(length)]
