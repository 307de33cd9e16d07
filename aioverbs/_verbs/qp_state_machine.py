"""PURE: the states of queue pairs, and what takes each type from one to the next.

The tables are those of the InfiniBand architecture, volume 1, chapter 11.2.5, with annex A14 for XRC, as attributes of
``ibv_modify_qp``. Alternate paths and rate limits are left out.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import index
from typing import NamedTuple, Self, TypedDict, cast

from aioverbs.attributes import AddressVector, DeviceAttributes, PortAttributes
from aioverbs.errors import TransitionError
from aioverbs.types import AccessFlags, LinkLayer, Mtu, QpState, QpType

__all__ = [
    "COUNTERPART",
    "Limits",
    "QpAttrs",
    "TransitionRule",
    "path",
    "plan",
    "reachable",
    "transition",
    "transition_rule",
]


class QpAttrs(TypedDict, total=False):
    """Attributes for ``ibv_modify_qp``, named as there."""

    cur_qp_state: QpState
    en_sqd_async_notify: bool
    qp_access_flags: AccessFlags
    pkey_index: int
    port_num: int
    qkey: int
    av: AddressVector
    path_mtu: Mtu
    dest_qp_num: int
    rq_psn: int
    max_dest_rd_atomic: int
    min_rnr_timer: int
    timeout: int
    retry_cnt: int
    rnr_retry: int
    sq_psn: int
    max_rd_atomic: int


class TransitionRule(NamedTuple):
    """The attributes that a transition must have, and those that it may have besides."""

    required: frozenset[str]
    optional: frozenset[str]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device and its port allow; without them, what the architecture does.

    :param ports: how many the device has.
    :param pkeys: the length of the port's table of partitions.
    :param gids: that of its table of GIDs.
    :param mtu: the largest packet that it takes.
    :param max_rd_atomic: reads and atomics that a queue pair can have under way.
    :param max_dest_rd_atomic: those of a peer that it can serve at once.
    :param needs_gid: a path without a GID leads nowhere, as over Ethernet.
    """

    ports: int = 0xFF
    pkeys: int = 0x10000
    gids: int = 0x100
    mtu: Mtu = Mtu.MTU_4096
    max_rd_atomic: int = 0xFF
    max_dest_rd_atomic: int = 0xFF
    needs_gid: bool = False

    @classmethod
    def of(cls, device: DeviceAttributes, port: PortAttributes) -> Self:
        """Those of a device and a port, as far as the verbs' structures can name them."""
        return cls(
            ports=device.phys_port_cnt,
            pkeys=max(port.pkey_tbl_len, 1),  # iWARP has no table, and its provider takes 0
            gids=min(port.gid_tbl_len, 0x100),
            mtu=port.active_mtu,
            max_rd_atomic=min(device.max_qp_init_rd_atom, 0xFF),
            max_dest_rd_atomic=min(device.max_qp_rd_atom, 0xFF),
            needs_gid=port.link_layer is LinkLayer.ETHERNET,
        )


# ---- The table

_RC, _UC, _UD, _SEND, _RECV = {QpType.RC}, {QpType.UC}, {QpType.UD}, {QpType.XRC_SEND}, {QpType.XRC_RECV}
_CONNECTED = _RC | _UC | _SEND | _RECV
_REQUESTERS, _RESPONDERS = _RC | _SEND, _RC | _RECV
_ALL = _CONNECTED | _UD
COUNTERPART = {
    **{each: each for each in (QpType.RC, QpType.UC, QpType.UD)},
    QpType.XRC_SEND: QpType.XRC_RECV,
    QpType.XRC_RECV: QpType.XRC_SEND,
}
"""What each type talks to."""

_S = QpState
# From, to, the types that it is about, what they must say, what they may say. A transition takes all rows of its type.
_ROWS: tuple[tuple[QpState, QpState, set[QpType], str, str], ...] = (
    (_S.RESET, _S.INIT, _ALL, "pkey_index port_num", ""),
    (_S.RESET, _S.INIT, _CONNECTED, "qp_access_flags", ""),
    (_S.RESET, _S.INIT, _UD, "qkey", ""),
    (_S.INIT, _S.INIT, _ALL, "", "pkey_index port_num"),
    (_S.INIT, _S.INIT, _CONNECTED, "", "qp_access_flags"),
    (_S.INIT, _S.INIT, _UD, "", "qkey"),
    (_S.INIT, _S.RTR, _ALL, "", "pkey_index"),
    (_S.INIT, _S.RTR, _CONNECTED, "av path_mtu dest_qp_num rq_psn", "qp_access_flags"),
    (_S.INIT, _S.RTR, _RESPONDERS, "max_dest_rd_atomic min_rnr_timer", ""),
    (_S.INIT, _S.RTR, _UD, "", "qkey"),
    (_S.RTR, _S.RTS, _ALL, "sq_psn", ""),
    (_S.RTR, _S.RTS, _REQUESTERS, "timeout retry_cnt rnr_retry max_rd_atomic", ""),
    (_S.RTR, _S.RTS, _RECV, "timeout", ""),
    # On the way to RTS, or in it, some may still be changed.
    *((state, _S.RTS, _ALL, "", "cur_qp_state") for state in (_S.RTR, _S.RTS, _S.SQD)),
    *((state, _S.RTS, _CONNECTED, "", "qp_access_flags") for state in (_S.RTR, _S.RTS, _S.SQD)),
    *((state, _S.RTS, _RESPONDERS, "", "min_rnr_timer") for state in (_S.RTR, _S.RTS, _S.SQD)),
    *((state, _S.RTS, _UD, "", "qkey") for state in (_S.RTR, _S.RTS, _S.SQD)),
    (_S.RTS, _S.SQD, _ALL, "", "en_sqd_async_notify"),
    (_S.SQD, _S.SQD, _ALL, "", "pkey_index"),
    (_S.SQD, _S.SQD, _CONNECTED, "", "av qp_access_flags"),
    (_S.SQD, _S.SQD, _REQUESTERS | _RESPONDERS, "", "port_num timeout"),
    (_S.SQD, _S.SQD, _REQUESTERS, "", "retry_cnt rnr_retry max_rd_atomic"),
    (_S.SQD, _S.SQD, _RESPONDERS, "", "max_dest_rd_atomic min_rnr_timer"),
    (_S.SQD, _S.SQD, _UD, "", "qkey"),
    # A send queue stops by itself, in SQE, only where nobody acknowledges.
    (_S.SQE, _S.RTS, _UC | _UD, "", "cur_qp_state"),
    (_S.SQE, _S.RTS, _UC, "", "qp_access_flags"),
    (_S.SQE, _S.RTS, _UD, "", "qkey"),
    # With nothing but the state; to ERR from everywhere but RESET, as the kernel has it.
    *((state, _S.RESET, _ALL, "", "") for state in _S),
    *((state, _S.ERR, _ALL, "", "") for state in _S if state is not _S.RESET),
)


def _table(qp_type: QpType) -> dict[tuple[QpState, QpState], TransitionRule]:
    found: dict[tuple[QpState, QpState], TransitionRule] = {}
    for before, after, types, must, may in _ROWS:
        if qp_type in types:
            required, optional = found.get((before, after), TransitionRule(frozenset(), frozenset()))
            found[before, after] = TransitionRule(required | set(must.split()), optional | set(may.split()))
    return found


_TABLE = {qp_type: _table(qp_type) for qp_type in COUNTERPART}


def _of(qp_type: QpType) -> dict[tuple[QpState, QpState], TransitionRule]:
    if qp_type not in _TABLE:
        names = ", ".join(each.name for each in _TABLE)
        raise ValueError(f"nothing is known of the states of type {qp_type.name}; of these it is: {names}")
    return _TABLE[qp_type]


# ---- What it says


def reachable(qp_type: QpType, state: QpState) -> tuple[QpState, ...]:
    """The states that one call takes it to from there; its own is among them where attributes can be changed in it.

    :raises ValueError: it is of a type that has no table here.
    """
    return tuple(after for after in QpState if (state, after) in _of(qp_type))


def transition_rule(qp_type: QpType, state: QpState, wanted: QpState) -> TransitionRule:
    """What a transition needs.

    :raises TransitionError: there is no such transition; where it can go to is in its `reachable`.
    :raises ValueError: it is of a type that has no table here.
    """
    found = _of(qp_type).get((state, wanted))
    if found is None:
        raise TransitionError(qp_type, state, wanted, reachable=reachable(qp_type, state))
    return found


def path(qp_type: QpType, state: QpState, wanted: QpState) -> tuple[QpState, ...]:
    """The shortest way: the states to move it to, one after the other; none where it is there.

    :raises TransitionError: there is no way, as to SQE, where it only goes by itself.
    :raises ValueError: it is of a type that has no table here.
    """
    ways: dict[QpState, tuple[QpState, ...]] = {state: ()}
    ahead = deque([state])
    while ahead and wanted not in ways:
        here = ahead.popleft()
        for after in reachable(qp_type, here):
            if after not in ways:
                ways[after] = (*ways[here], after)
                ahead.append(after)
    if wanted not in ways:
        raise TransitionError(qp_type, state, wanted, reachable=reachable(qp_type, state))
    return ways[wanted]


def transition(
    qp_type: QpType,
    state: QpState,
    wanted: QpState,
    attributes: QpAttrs,
    *,
    defaults: QpAttrs | None = None,
    limits: Limits | None = None,
    draining: bool = False,
) -> QpAttrs:
    """The attributes to hand to ``ibv_modify_qp``, which then has nothing to refuse.

    :param attributes: those that are given.
    :param defaults: for those that are required and not given.
    :param limits: of the device; None for the architecture's.
    :param draining: in SQD, something that was begun before it has not ended yet.
    :raises TransitionError: what is missing, does not belong or is out of its range; or there is no such transition.
    :raises ValueError: it is of a type that has no table here.
    """
    required, optional = transition_rule(qp_type, state, wanted)
    chosen: dict[str, object] = {name: value for name, value in (defaults or {}).items() if name in required}
    chosen.update(attributes)
    missing = tuple(sorted(required - chosen.keys()))
    unexpected = tuple(sorted(chosen.keys() - required - optional))
    wrong = dict(_wrong(chosen, state, limits or Limits()))
    if draining and state is wanted is QpState.SQD:
        wrong["sq_draining"] = "what is under way must end first: wait for EventType.SQ_DRAINED"
    if missing or unexpected or wrong:
        raise TransitionError(qp_type, state, wanted, missing, unexpected, wrong, reachable(qp_type, state))
    return cast(QpAttrs, chosen)


def plan(
    qp_type: QpType,
    state: QpState,
    states: Iterable[QpState],
    attributes: QpAttrs,
    *,
    defaults: QpAttrs | None = None,
    limits: Limits | None = None,
    draining: bool = False,
) -> list[tuple[QpState, QpAttrs]]:
    """The same for several transitions in a row: each attribute goes to the first that takes it.

    :raises TransitionError: see `transition`; an attribute that none takes does not belong to the last.
    :raises ValueError: it is of a type that has no table here.
    """
    ahead = tuple(states)
    left: dict[str, object] = dict(attributes)
    steps: list[tuple[QpState, QpAttrs]] = []
    for number, wanted in enumerate(ahead, 1):
        takes = transition_rule(qp_type, state, wanted)
        names = left.keys() if number == len(ahead) else left.keys() & (takes.required | takes.optional)
        given = cast(QpAttrs, {name: left.pop(name) for name in tuple(names)})
        steps.append(
            (wanted, transition(qp_type, state, wanted, given, defaults=defaults, limits=limits, draining=draining))
        )
        state = wanted
    return steps


# ---- Values

_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC


def _ranges(limits: Limits) -> dict[str, tuple[int, int]]:
    return {
        "pkey_index": (0, limits.pkeys - 1),
        "port_num": (1, limits.ports),
        "qkey": (0, 0xFFFFFFFF),
        "path_mtu": (Mtu.MTU_256, limits.mtu),
        "dest_qp_num": (0, 0xFFFFFF),
        "rq_psn": (0, 0xFFFFFF),
        "sq_psn": (0, 0xFFFFFF),
        "max_rd_atomic": (0, limits.max_rd_atomic),
        "max_dest_rd_atomic": (0, limits.max_dest_rd_atomic),
        "min_rnr_timer": (0, 31),
        "timeout": (0, 31),
        "retry_cnt": (0, 7),
        "rnr_retry": (0, 7),
    }


def _path_ranges(limits: Limits) -> dict[str, tuple[int, int]]:
    return {
        "port_num": (1, limits.ports),
        "sgid_index": (0, limits.gids - 1),
        "hop_limit": (0, 0xFF),
        "flow_label": (0, 0xFFFFF),
        "traffic_class": (0, 0xFF),
        "dlid": (0, 0xFFFF),
        "sl": (0, 15),
        "src_path_bits": (0, 0x7F),
        "static_rate": (0, 0xFF),
    }


def _wrong(attributes: Mapping[str, object], state: QpState, limits: Limits) -> Iterable[tuple[str, str]]:
    """What has a value that cannot be, and why."""
    for name, ends in _ranges(limits).items():
        if name in attributes:
            yield from _outside(name, attributes[name], ends)
    av = attributes.get("av")
    if isinstance(av, AddressVector):
        for name, ends in _path_ranges(limits).items():
            yield from _outside(f"av.{name}", getattr(av, name), ends)
        if limits.needs_gid and not av.dgid:
            yield "av.dgid", "over Ethernet a path has the GID of its end"
    elif "av" in attributes:
        yield "av", f"an AddressVector, not {av!r}"
    believed = attributes.get("cur_qp_state", state)
    if believed != state:
        yield "cur_qp_state", f"{QpState(cast(int, believed)).name}, but it is in {state.name}"
    access = index(cast(int, attributes.get("qp_access_flags", 0)))
    if access & ~int(_ACCESS):  # as integers: enumerations forget bits that they do not know
        yield "qp_access_flags", f"{access:#x}, but a queue pair has only those of {_ACCESS!r}"


def _outside(name: str, value: object, ends: tuple[int, int]) -> Iterable[tuple[str, str]]:
    low, high = ends
    if not low <= index(cast(int, value)) <= high:
        yield name, f"{index(cast(int, value))}, which is not from {low} to {high}"
