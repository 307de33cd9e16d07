"""PURE: state machine of queue pairs: transitions of each type, and the attributes that each transition accepts.

The tables are those of the InfiniBand architecture, volume 1, chapter 11.2.5, with annex A14 for XRC, expressed as
attributes of ``ibv_modify_qp``. Alternate paths and rate limits are left out.
"""

import functools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter, index
from typing import Any, NamedTuple, Self, TypedDict, cast

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
    """Attributes of ``ibv_modify_qp``, with the same names; each may be absent."""

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
    """Names of the attributes that a transition requires and accepts.

    :param required: names of the attributes that must be given.
    :param optional: names of the attributes that may be given.
    """

    required: frozenset[str]
    optional: frozenset[str]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a device and one of its ports. The defaults are those of the architecture.

    :param ports: number of ports of the device.
    :param pkeys: length of the port's P_Key table.
    :param gids: length of the port's GID table.
    :param mtu: MTU of the port; `Mtu.NONE` if it has none, so that no path MTU is valid.
    :param max_rd_atomic: maximum number of reads and atomics that a queue pair can have in flight.
    :param max_dest_rd_atomic: maximum number of reads and atomics of the peer that a queue pair can respond to at once.
    :param needs_gid: whether a path requires a GID, as it does over Ethernet.
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
        """Return the `Limits` of a device and one of its ports, clamped to the widths of the ABI's fields.

        :param device: attributes of the device.
        :param port: attributes of the port.
        """
        return cls(
            ports=device.phys_port_cnt,
            pkeys=max(port.pkey_tbl_len, 1),  # iWARP has no P_Key table; its provider accepts index 0
            gids=min(port.gid_tbl_len, 0x100),
            mtu=port.active_mtu,
            max_rd_atomic=min(device.max_qp_init_rd_atom, 0xFF),
            max_dest_rd_atomic=min(device.max_qp_rd_atom, 0xFF),
            needs_gid=port.link_layer is LinkLayer.ETHERNET,
        )


# ---- Transition table

_RC, _UC, _UD, _SEND, _RECV = {QpType.RC}, {QpType.UC}, {QpType.UD}, {QpType.XRC_SEND}, {QpType.XRC_RECV}
_CONNECTED = _RC | _UC | _SEND | _RECV
_REQUESTERS, _RESPONDERS = _RC | _SEND, _RC | _RECV
_ALL = _CONNECTED | _UD
COUNTERPART = {
    **{each: each for each in (QpType.RC, QpType.UC, QpType.UD)},
    QpType.XRC_SEND: QpType.XRC_RECV,
    QpType.XRC_RECV: QpType.XRC_SEND,
}
"""Type of the peer's queue pair, for each type."""

_S = QpState
# From, to, applicable types, required attributes, optional attributes. The rule of a transition combines all rows that
# apply to the type of the queue pair.
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
    # Some attributes can be changed on the transition to RTS or in RTS.
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
    # A send queue stops by itself, in SQE, only for types without acknowledgements.
    (_S.SQE, _S.RTS, _UC | _UD, "", "cur_qp_state"),
    (_S.SQE, _S.RTS, _UC, "", "qp_access_flags"),
    (_S.SQE, _S.RTS, _UD, "", "qkey"),
    # Without attributes. ERR can be reached from every state except RESET, as in the kernel.
    *((state, _S.RESET, _ALL, "", "") for state in _S),
    *((state, _S.ERR, _ALL, "", "") for state in _S if state is not _S.RESET),
)


def _table(qp_type: QpType) -> dict[tuple[QpState, QpState], TransitionRule]:
    """Return a dictionary from the two states of each transition of a queue pair type to the `TransitionRule`."""
    found: dict[tuple[QpState, QpState], TransitionRule] = {}
    for before, after, types, must, may in _ROWS:
        if qp_type in types:
            required, optional = found.get((before, after), TransitionRule(frozenset(), frozenset()))
            found[before, after] = TransitionRule(required | set(must.split()), optional | set(may.split()))
    return found


_TABLE = {qp_type: _table(qp_type) for qp_type in COUNTERPART}


def _table_of(qp_type: QpType) -> dict[tuple[QpState, QpState], TransitionRule]:
    """Return the dictionary that `_table` has made for a queue pair type.

    :raises ValueError: there is no transition table for the type.
    """
    if qp_type not in _TABLE:
        names = ", ".join(each.name for each in _TABLE)
        raise ValueError(f"there is no transition table for type {qp_type.name}: use one of {names}")
    return _TABLE[qp_type]


# ---- Queries


@functools.cache
def reachable(qp_type: QpType, state: QpState) -> tuple[QpState, ...]:
    """Return a tuple of the states that can be reached by one transition, in the order of `QpState`.

    The current state is included if attributes can be changed without leaving it.

    :param qp_type: type of the queue pair.
    :param state: current state.
    :raises ValueError: there is no transition table for the type.
    """
    return tuple(after for after in QpState if (state, after) in _table_of(qp_type))


@functools.cache
def transition_rule(qp_type: QpType, state: QpState, wanted: QpState) -> TransitionRule:
    """Return the `TransitionRule` of a transition: the names of the attributes that it requires and accepts.

    :param qp_type: type of the queue pair.
    :param state: current state.
    :param wanted: state to move to.
    :raises TransitionError: there is no such transition; its `reachable` lists the states that can be reached.
    :raises ValueError: there is no transition table for the type.
    """
    found = _table_of(qp_type).get((state, wanted))
    if found is None:
        raise TransitionError(qp_type, state, wanted, reachable=reachable(qp_type, state))
    return found


@functools.cache
def path(qp_type: QpType, state: QpState, wanted: QpState) -> tuple[QpState, ...]:
    """Return the states that the shortest sequence of transitions goes through, without the current state.

    :param qp_type: type of the queue pair.
    :param state: current state.
    :param wanted: state to move to.
    :returns: a tuple that ends with `wanted`; empty if `state` is `wanted`.
    :raises TransitionError: there is no such sequence, for example to SQE, which a queue pair only enters by itself.
    :raises ValueError: there is no transition table for the type.
    """
    paths: dict[QpState, tuple[QpState, ...]] = {state: ()}
    remaining = deque([state])
    while remaining and wanted not in paths:
        here = remaining.popleft()
        for after in reachable(qp_type, here):
            if after not in paths:
                paths[after] = (*paths[here], after)
                remaining.append(after)
    if wanted not in paths:
        raise TransitionError(qp_type, state, wanted, reachable=reachable(qp_type, state))
    return paths[wanted]


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
    """Return the attributes for one transition with ``ibv_modify_qp``, with defaults added and all values checked.

    :param qp_type: type of the queue pair.
    :param state: current state.
    :param wanted: state to move to.
    :param attributes: attributes given by the caller.
    :param defaults: values of required attributes that are not given.
    :param limits: limits of the device and port; None for those of the architecture.
    :param draining: whether the send queue is in SQD and still has requests in flight.
    :returns: `attributes` together with the defaults of the required attributes that it lacks.
    :raises TransitionError: there is no such transition, or an attribute is missing, unexpected or out of range, or
        attributes are to be changed in SQD although `draining` is True.
    :raises ValueError: there is no transition table for the type, or ``cur_qp_state`` is not a `QpState`.
    :raises TypeError: the value of a numeric attribute is not an integer.
    """
    required, optional = transition_rule(qp_type, state, wanted)
    chosen: dict[str, Any] = {name: value for name, value in (defaults or {}).items() if name in required}
    chosen.update(attributes)
    missing = [name for name in required if name not in chosen]
    unexpected = [name for name in attributes if name not in required and name not in optional]
    wrong = _invalid_values(chosen, state, limits or Limits())
    if draining and state is wanted is QpState.SQD:
        wrong["sq_draining"] = "requests in flight must complete first: wait for EventType.SQ_DRAINED"
    if missing or unexpected or wrong:
        raise TransitionError(
            qp_type,
            state,
            wanted,
            tuple(sorted(missing)),
            tuple(sorted(unexpected)),
            wrong,
            reachable(qp_type, state),
        )
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
    """Return the attributes for a sequence of transitions. Each attribute goes to the first transition that accepts it.

    :param qp_type: type of the queue pair.
    :param state: current state.
    :param states: states to move to, in order.
    :param attributes: attributes given by the caller, for all transitions together.
    :param defaults: as for `transition`.
    :param limits: as for `transition`.
    :param draining: as for `transition`.
    :returns: pairs of a state to move to and its attributes, in order.
    :raises TransitionError: as for `transition`; an attribute that no transition accepts is reported as unexpected in
        the last one.
    :raises ValueError: as for `transition`.
    :raises TypeError: the value of a numeric attribute is not an integer.
    """
    remaining = tuple(states)
    left: dict[str, object] = dict(attributes)
    steps: list[tuple[QpState, QpAttrs]] = []
    for number, wanted in enumerate(remaining, 1):
        required, optional = transition_rule(qp_type, state, wanted)
        is_last = number == len(remaining)
        names = [name for name in left if is_last or name in required or name in optional]
        given = cast(QpAttrs, {name: left.pop(name) for name in names})
        steps.append(
            (wanted, transition(qp_type, state, wanted, given, defaults=defaults, limits=limits, draining=draining))
        )
        state = wanted
    return steps


# ---- Values

_ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
_ACCESS_BITS = int(_ACCESS)


@functools.lru_cache
def _ranges(limits: Limits) -> dict[str, tuple[int, int]]:
    """Return a dictionary from the name of each numeric attribute to its lowest and highest valid values."""
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


@functools.lru_cache
def _path_ranges(limits: Limits) -> dict[str, tuple[int, int]]:
    """Return a dictionary from each numeric field of an address vector to its lowest and highest valid values."""
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


_path_values = attrgetter(*_path_ranges(Limits()))


def _invalid_values(attributes: Mapping[str, Any], state: QpState, limits: Limits) -> dict[str, str]:
    """Return, for each attribute with an invalid value, its name and a text that says which values are valid.

    Fields of the address vector are named ``av.NAME``.

    :raises TypeError: the value of a numeric attribute is not an integer.
    :raises ValueError: ``cur_qp_state`` is not a `QpState`.
    """
    wrong: dict[str, str] = {}
    ranges = _ranges(limits)
    for name, given in attributes.items():
        if name not in ranges:
            continue
        value = index(given)
        low, high = ranges[name]
        if name == "path_mtu" and not limits.mtu:
            wrong[name] = "the port has no MTU: bring its network interface up"
        elif not low <= value <= high:
            wrong[name] = f"must be {low} to {high}, got {value}"
    av = attributes.get("av")
    if isinstance(av, AddressVector):
        path_ranges = _path_ranges(limits)
        for value, (name, (low, high)) in zip(map(index, _path_values(av)), path_ranges.items(), strict=True):
            if not low <= value <= high:
                wrong[f"av.{name}"] = f"must be {low} to {high}, got {value}"
        if limits.needs_gid and not av.dgid:
            wrong["av.dgid"] = "must be the GID of the peer's port over Ethernet, got none"
    elif "av" in attributes:
        wrong["av"] = f"must be an AddressVector, got {av!r}"
    assumed = attributes.get("cur_qp_state", state)
    if assumed != state:
        wrong["cur_qp_state"] = f"{QpState(assumed).name}, but the queue pair is in {state.name}"
    access = index(attributes.get("qp_access_flags", 0))
    if access & ~_ACCESS_BITS:  # compared as integers: AccessFlags drops unknown bits
        wrong["qp_access_flags"] = f"must be a combination of {_ACCESS!r}, got {access:#x}"
    return wrong
