"""What stands in a port's GID table, and from which of it is sent."""

from aioverbs._core import engine
from aioverbs.gids import Gid, preferred
from aioverbs.providers import hardware, software

__all__ = ["gid_index", "gid_table"]


def gid_table(context: engine.Context, port: int) -> list[Gid]:
    """The GIDs that a port has: ``ibv_query_gid_table``.

    :raises VerbsError: the device does not tell.
    """
    if context.software:
        return software.gid_table(context, port)
    return hardware.gid_table(context, port)


def gid_index(context: engine.Context, port: int) -> int:
    """The index of the GID to send from, of those that the port has now: see `gids.preferred`.

    :raises ValueError: it has none, or the device no such port.
    :raises VerbsError: the device does not tell.
    """
    count = context.query_device().phys_port_cnt
    if not 1 <= port <= count:
        raise ValueError(f"{context.name} has the ports 1 to {count}, and not {port}")
    found = preferred(gid_table(context, port))
    if found is None:
        raise ValueError(
            f"port {port} of {context.name} has no GID: give its network interface an address and bring it up"
        )
    return found
