"""Ports of a device: GID table, choice of the source GID, and limits."""

from aioverbs._core.handles import handles
from aioverbs._providers import hardware, software
from aioverbs._verbs.qp_state_machine import Limits
from aioverbs.gid_selection import Gid, select_gid_index

__all__ = ["check_port", "gid_index", "gid_table", "limits_of"]

_MAX_GIDS = 1 << 8  # range of ``sgid_index`` in ``ibv_global_route``


def gid_table(context: handles.Context, port: int) -> list[Gid]:
    """Query the GID table of a port (``ibv_query_gid_table``) and return it as a list of `Gid`.

    :raises ValueError: the port does not exist.
    :raises VerbsError: the verb failed.
    """
    check_port(context, port)
    if context.software:
        return software.gid_table(context, port)
    return hardware.gid_table(context, port)


def check_port(context: handles.Context, port: int, gid_index: int | None = None) -> None:
    """Check that the device has the given port, and that the port's GID table has the given index.

    :param context: context of the device.
    :param port: number of the port.
    :param gid_index: index in the GID table; None to check only the port.
    :raises ValueError: the port or the index does not exist, or the index is greater than 255.
    :raises VerbsError: the port cannot be queried.
    """
    count = context.attributes.phys_port_cnt
    if not 1 <= port <= count:
        raise ValueError(f"`port` must be 1 to {count} for {context.name}, got {port}")
    if gid_index is not None:
        gids = min(context.query_port(port).gid_tbl_len, _MAX_GIDS)
        if not 0 <= gid_index < gids:
            raise ValueError(
                f"`gid_index` must be 0 to {gids - 1} for port {port} of {context.name}, got {gid_index}: leave it"
                " out to have one chosen"
            )


def limits_of(context: handles.Context, port: int) -> Limits:
    """Query the device of `context` and its port `port`, and return the `Limits` of queue pairs on that port.

    :raises VerbsError: the device has no such port, or cannot be queried.
    """
    return Limits.of(context.attributes, context.query_port(port))


def gid_index(context: handles.Context, port: int) -> int:
    """Return the index of the GID to send from in a port's GID table, as `select_gid_index` chooses it.

    :raises ValueError: the port does not exist or has no GID.
    :raises VerbsError: the GID table cannot be queried.
    :raises LibraryNotFoundError: as for `gid_table`.
    """
    found = select_gid_index(gid_table(context, port))
    if found is None:
        raise ValueError(
            f"port {port} of {context.name} has no GID: give its network interface an address and bring it up"
        )
    return found
