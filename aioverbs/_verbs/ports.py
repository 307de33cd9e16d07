"""What a port has: its GID table, from which of it is sent, its limits."""

from aioverbs._core.handles import handles
from aioverbs._providers import hardware, software
from aioverbs._verbs.qp_state_machine import Limits
from aioverbs.gid_selection import Gid, preferred

__all__ = ["check_port", "gid_index", "gid_table", "limits_of"]

_MOST_GIDS = 1 << 8  # the indices that ``sgid_index`` of ``ibv_global_route`` can have


def gid_table(context: handles.Context, port: int) -> list[Gid]:
    """The GIDs that a port has: ``ibv_query_gid_table``.

    :raises VerbsError: the device does not tell.
    """
    if context.software:
        return software.gid_table(context, port)
    return hardware.gid_table(context, port)


def check_port(context: handles.Context, port: int, gid_index: int | None = None) -> None:
    """See that the device has that port, and the port a GID at that index, if one is given.

    :raises ValueError: it has not.
    :raises VerbsError: the device does not tell.
    """
    count = context.attributes.phys_port_cnt
    if not 1 <= port <= count:
        raise ValueError(f"{context.name} has the ports 1 to {count}, and not {port}")
    if gid_index is not None:
        gids = min(context.query_port(port).gid_tbl_len, _MOST_GIDS)
        if not 0 <= gid_index < gids:
            raise ValueError(
                f"port {port} of {context.name} has GIDs at the indices 0 to {gids - 1}, and none at {gid_index}: give"
                " no gid_index to have one chosen"
            )


def limits_of(context: handles.Context, port: int) -> Limits:
    """What a device and its port allow queue pairs.

    :raises VerbsError: the device does not tell, or has no such port.
    """
    return Limits.of(context.attributes, context.query_port(port))


def gid_index(context: handles.Context, port: int) -> int:
    """The index of the GID to send from, of those that the port has now: see `gids.preferred`.

    :raises ValueError: it has none, or the device no such port.
    :raises VerbsError: the device does not tell.
    """
    check_port(context, port)
    found = preferred(gid_table(context, port))
    if found is None:
        raise ValueError(
            f"port {port} of {context.name} has no GID: give its network interface an address and bring it up"
        )
    return found
