"""The transition table accepts exactly the transitions of the software device, and its errors name the problem."""

import errno
import itertools
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings, strategies as st

from aioverbs import AccessFlags, LinkLayer, Mtu, QpState, QpType, TransitionError, VerbsError
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from aioverbs._verbs.qp_state_machine import (
    COUNTERPART,
    Limits,
    QpAttrs,
    path,
    plan,
    reachable,
    transition,
    transition_rule,
)
from aioverbs.attributes import AddressVector
from tests.core.transitions import (
    ERR,
    INIT,
    RC,
    REACHABLE,
    RESET,
    RTR,
    RTS,
    SQD,
    SQE,
    UC,
    UD,
    XRC_RECV,
    XRC_SEND,
    make_factory,
    rule,
)

TYPES = (RC, UC, UD, XRC_SEND, XRC_RECV)
every_type = pytest.mark.parametrize("qp_type", TYPES, ids=lambda qp_type: qp_type.name)

# Values at the limits, on both sides of them.
_PSNS = (0, 0xFFFFFF, 0x1000000, 1 << 32, -1)
_DEPTHS = (0, 1, 16, 17, 255, 256, -1)
EDGE_VALUES: dict[str, tuple[Any, ...]] = {
    "path_mtu": (0, 1, 5, 6, -1),
    "rq_psn": _PSNS,
    "sq_psn": _PSNS,
    "dest_qp_num": _PSNS,
    "qp_access_flags": (0, 1, 15, AccessFlags.MW_BIND, AccessFlags.RELAXED_ORDERING, 1 << 30, 1 << 32, -1),
    "pkey_index": (0, 1, 0xFFFF, 0x10000, -1),
    "port_num": (0, 1, 2, 255, 256, -1),
    "max_rd_atomic": _DEPTHS,
    "max_dest_rd_atomic": _DEPTHS,
    "min_rnr_timer": (0, 31, 32, 255, 256, -1),
    "timeout": (0, 31, 32, 255, 256, -1),
    "retry_cnt": (0, 7, 8, 256, -1),
    "rnr_retry": (0, 7, 8, 256, -1),
    "qkey": (0, 0x80000000, 0xFFFFFFFF, 1 << 32, -1),
    "cur_qp_state": tuple(QpState),
    "en_sqd_async_notify": (False, True),
}
EDGE_VECTORS: dict[str, tuple[Any, ...]] = {
    "dgid": (b"",),
    "sgid_index": (0, 1, 2, 255, 256, -1),
    "port_num": (0, 1, 2, 255, 256, -1),
    "hop_limit": (0, 255, 256, -1),
    "flow_label": (0, 0xFFFFF, 1 << 32, -1),
    "traffic_class": (0, 255, 256, -1),
    "dlid": (0, 0xFFFF, 0x10000, -1),
    "sl": (0, 15, 256, -1),
    "src_path_bits": (0, 127, 256, -1),
    "static_rate": (0, 255, 256, -1),
}


@every_type
def test_the_table_has_the_transitions_of_the_architecture(qp_type: QpType) -> None:
    for before, after in itertools.product(QpState, QpState):
        expected = rule(qp_type, before, after)
        assert (after in reachable(qp_type, before)) == (expected is not None)
        if expected is None:
            with pytest.raises(TransitionError, match="no such transition"):
                transition_rule(qp_type, before, after)
        else:
            required, optional = transition_rule(qp_type, before, after)
            assert (set(required), set(optional - required)) == expected


def test_the_table_accepts_what_the_device_accepts(inline: software.Context) -> None:
    """Draw attributes, sometimes too many or too few, with values on both sides of a limit."""
    factory = make_factory(inline)
    limits = Limits.of(inline.query_device(), inline.query_port(1))
    answers = {True: 0, False: 0}

    @settings(max_examples=200)
    @given(data=st.data())
    def compare(data: st.DataObject) -> None:
        qp_type, before = data.draw(st.sampled_from(REACHABLE))
        good = factory.attributes(before)
        targets = [after for after in QpState if rule(qp_type, before, after)]
        after = data.draw(st.sampled_from(targets) | st.sampled_from(QpState))
        required, optional = rule(qp_type, before, after) or (set(), set())
        names = required | {name for name in sorted(optional) if data.draw(st.booleans())}
        names ^= data.draw(st.just(set()) | st.sets(st.sampled_from(sorted(good)), max_size=1))
        attributes = {name: good[name] for name in names}
        for name in data.draw(st.just(set()) | st.sets(st.sampled_from(sorted(names)), max_size=2)) if names else ():
            if name == "av":
                part = data.draw(st.sampled_from(sorted(EDGE_VECTORS)))
                attributes["av"] = replace(good["av"], **{part: data.draw(st.sampled_from(EDGE_VECTORS[part]))})
            else:
                attributes[name] = data.draw(st.sampled_from(EDGE_VALUES[name]))
        accepted = table_accepts(qp_type, before, after, attributes, limits)
        qp = factory.make(qp_type, before)
        assert device_accepts(qp, after, attributes) == accepted, (after, attributes)
        qp.destroy()
        answers[accepted] += 1

    compare()
    assert min(answers.values()) > 5, "the draws hardly covered both answers"


@every_type
def test_the_table_has_the_limits_of_the_device(inline: software.Context, qp_type: QpType) -> None:
    """Try every value of `ODD` and `PATHS`, with otherwise valid attributes, in each transition that allows it."""
    factory = make_factory(inline)
    limits = Limits.of(inline.query_device(), inline.query_port(1))
    answers = set()
    for before, after in ((RESET, INIT), (INIT, RTR), (RTR, RTS), (RTS, SQD), (SQD, SQD), (SQD, RTS)):
        good = factory.attributes(before)
        required, optional = transition_rule(qp_type, before, after)
        cases = [(name, value) for name in sorted(required | optional) for value in EDGE_VALUES.get(name, ())]
        if "av" in required | optional:
            cases += [
                ("av", replace(good["av"], **{part: each})) for part, values in EDGE_VECTORS.items() for each in values
            ]
        for name, value in cases:
            attributes = {each: good[each] for each in required} | {name: value}
            qp = factory.make(qp_type, before)
            accepted = table_accepts(qp_type, before, after, attributes, limits)
            assert device_accepts(qp, after, attributes) == accepted, (before, after, name, value)
            qp.destroy()
            answers.add(accepted)
    assert answers == {True, False}


def table_accepts(qp_type: QpType, before: QpState, after: QpState, attributes: dict[str, Any], limits: Limits) -> bool:
    """Return whether the table accepts the transition."""
    before_call = dict(attributes)
    try:
        result = transition(qp_type, before, after, cast(QpAttrs, attributes), limits=limits)
    except TransitionError as error:
        explained = error.missing or error.unexpected or error.wrong or after not in error.reachable
        result = None
    else:
        explained = result == attributes
    assert explained
    assert attributes == before_call
    return result is not None


def device_accepts(qp: handles.QueuePair, after: QpState, attributes: dict[str, Any]) -> bool:
    """Return whether the device accepts the transition."""
    refusal: Exception | None = None
    try:
        qp.modify(after, **attributes)
    except OverflowError as error:  # a value that the structure has no room for never reaches the device
        refusal = error
    except VerbsError as error:
        refusal = error
    assert getattr(refusal, "errno", errno.EINVAL) == errno.EINVAL
    return refusal is None


# ---- Paths


def test_paths_between_states() -> None:
    for qp_type in TYPES:
        check_paths(qp_type)


def check_paths(qp_type: QpType) -> None:
    assert path(qp_type, RESET, RTS) == (INIT, RTR, RTS)
    assert path(qp_type, INIT, RTS) == (RTR, RTS)
    assert path(qp_type, ERR, RTS) == (RESET, INIT, RTR, RTS)
    assert path(qp_type, SQD, RTR) == (RESET, INIT, RTR)
    assert path(qp_type, RTS, RTS) == ()
    for before in QpState:
        for after in QpState:
            if before is not after and after in (SQE, QpState.UNKNOWN):
                with pytest.raises(TransitionError, match=f"from {before.name} to {after.name}: there is no such"):
                    path(qp_type, before, after)
                continue
            here = before
            for step in path(qp_type, before, after):
                assert step in reachable(qp_type, here)
                here = step
            assert here is after


def test_types_without_a_table() -> None:
    for call in (
        lambda: transition_rule(QpType.RAW_PACKET, RESET, INIT),
        lambda: reachable(QpType.DRIVER, RESET),
        lambda: path(QpType.RAW_PACKET, RESET, RTS),
    ):
        with pytest.raises(
            ValueError, match=r"no transition table for type \w+: use one of RC, UC, UD, XRC_SEND, XRC_RECV"
        ):
            call()
    assert {COUNTERPART[COUNTERPART[each]] is each for each in COUNTERPART} == {True}


# ---- Defaults and plans

DEFAULTS = QpAttrs(
    pkey_index=0, port_num=1, qp_access_flags=AccessFlags.LOCAL_WRITE, timeout=14, retry_cnt=6, rnr_retry=6, sq_psn=9
)


def test_defaults_replace_required_attributes_only() -> None:
    assert transition(RC, RESET, INIT, {"pkey_index": 3}, defaults=DEFAULTS) == {
        "pkey_index": 3,
        "port_num": 1,
        "qp_access_flags": AccessFlags.LOCAL_WRITE,
    }
    assert transition(RC, INIT, INIT, {}, defaults=DEFAULTS) == {}
    assert transition(UC, RTR, RTS, {}, defaults=DEFAULTS) == {"sq_psn": 9}
    with pytest.raises(TransitionError) as caught:
        transition(RC, RTR, RTS, {}, defaults=DEFAULTS)
    assert caught.value.missing == ("max_rd_atomic",)


def test_a_plan_sets_each_attribute_at_the_first_possible_step() -> None:
    vector = AddressVector(bytes(range(16)))
    attributes = QpAttrs(
        qp_access_flags=AccessFlags.REMOTE_READ,
        av=vector,
        path_mtu=Mtu.MTU_1024,
        dest_qp_num=7,
        rq_psn=8,
        max_dest_rd_atomic=2,
        min_rnr_timer=3,
        timeout=15,
        max_rd_atomic=4,
    )
    before = dict(attributes)
    steps = dict(plan(RC, RESET, path(RC, RESET, RTS), attributes, defaults=DEFAULTS))
    assert attributes == before
    assert list(steps) == [INIT, RTR, RTS]
    assert steps[INIT] == {"pkey_index": 0, "port_num": 1, "qp_access_flags": AccessFlags.REMOTE_READ}
    assert set(steps[RTR]) == {"av", "path_mtu", "dest_qp_num", "rq_psn", "max_dest_rd_atomic", "min_rnr_timer"}
    assert steps[RTS] == {"timeout": 15, "max_rd_atomic": 4, "retry_cnt": 6, "rnr_retry": 6, "sq_psn": 9}
    # From INIT the access flags go to the next transition, which allows them.
    later = dict(plan(RC, INIT, path(RC, INIT, RTS), attributes, defaults=DEFAULTS))
    assert later == {RTR: {**steps[RTR], "qp_access_flags": AccessFlags.REMOTE_READ}, RTS: steps[RTS]}


def test_a_plan_is_refused_as_a_whole() -> None:
    with pytest.raises(TransitionError) as caught:
        plan(UD, RESET, (INIT, RTR, RTS), {"qkey": 1, "timeout": 3}, defaults=DEFAULTS)
    assert (caught.value.state, caught.value.wanted, caught.value.unexpected) == (RTR, RTS, ("timeout",))
    with pytest.raises(TransitionError) as caught:
        plan(UC, RTS, (INIT, RTR, RTS), {}, defaults=DEFAULTS)
    assert (caught.value.state, caught.value.wanted) == (RTS, INIT)
    assert caught.value.reachable == (RESET, RTS, SQD, ERR)
    assert plan(UC, RTS, (), {}) == []


# ---- Error texts

VECTOR = AddressVector(bytes(range(16)), sgid_index=1)
PATH = QpAttrs(av=VECTOR, path_mtu=Mtu.MTU_1024, dest_qp_num=1, rq_psn=2)


@pytest.mark.parametrize(
    ("qp_type", "before", "after", "attributes", "text"),
    [
        (RC, RESET, RTR, {}, "from RESET to RTR: there is no such transition; reachable from RESET: RESET, INIT"),
        (UC, ERR, RTS, {}, "from ERR to RTS: there is no such transition; reachable from ERR: RESET, ERR"),
        (RC, SQE, RTS, {}, "from SQE to RTS: there is no such transition; reachable from SQE: RESET, ERR"),
        (RC, RESET, ERR, {}, "from RESET to ERR: there is no such transition; reachable from RESET: RESET, INIT"),
        (RC, RESET, INIT, {}, "from RESET to INIT: attributes are missing: pkey_index, port_num, qp_access_flags"),
        (
            UC,
            INIT,
            RTR,
            {"rq_psn": 1},
            "missing: av, dest_qp_num, path_mtu (pass the remote endpoint to set those that describe the peer)",
        ),
        (
            UC,
            INIT,
            RTR,
            {**PATH, "min_rnr_timer": 3},
            "from INIT to RTR: not allowed in this transition: min_rnr_timer",
        ),
        (UD, INIT, RTR, PATH, "not allowed in this transition: av, dest_qp_num, path_mtu, rq_psn"),
        (RC, RTS, ERR, {"timeout": 4}, "from RTS to ERR: not allowed in this transition: timeout"),
        (UC, INIT, RTR, {**PATH, "path_mtu": 0}, "path_mtu: must be 1 to 4, got 0"),
        (UC, INIT, RTR, {**PATH, "path_mtu": Mtu.MTU_4096}, "path_mtu: must be 1 to 4, got 5"),
        (UC, INIT, RTR, {**PATH, "dest_qp_num": 1 << 24}, "dest_qp_num: must be 0 to 16777215, got 16777216"),
        (UC, INIT, RTR, {**PATH, "av": replace(VECTOR, dgid=b"")}, "av.dgid: must be the GID of the peer's port"),
        (UC, INIT, RTR, {**PATH, "av": replace(VECTOR, sl=16)}, "av.sl: must be 0 to 15, got 16"),
        (UC, INIT, RTR, {**PATH, "av": replace(VECTOR, sgid_index=8)}, "av.sgid_index: must be 0 to 7, got 8"),
        (UC, INIT, RTR, {**PATH, "av": "there"}, "av: must be an AddressVector, got 'there'"),
        (RC, SQD, SQD, {"rnr_retry": 8}, "from SQD to SQD: rnr_retry: must be 0 to 7, got 8"),
        (RC, SQD, SQD, {"max_rd_atomic": 17}, "max_rd_atomic: must be 0 to 16, got 17"),
        (RC, SQD, SQD, {"max_dest_rd_atomic": 33}, "max_dest_rd_atomic: must be 0 to 32, got 33"),
        (RC, SQD, SQD, {"port_num": 3}, "port_num: must be 1 to 2, got 3"),
        (RC, SQD, SQD, {"pkey_index": 4}, "pkey_index: must be 0 to 3, got 4"),
        (RC, SQD, RTS, {"cur_qp_state": RTS}, "from SQD to RTS: cur_qp_state: RTS, but the queue pair is in SQD"),
        (RC, RTS, RTS, {"qp_access_flags": 0x10}, "qp_access_flags: must be a combination of"),
        (
            UC,
            RTR,
            RTS,
            {"timeout": 3, "qp_access_flags": 0x20},
            "missing: sq_psn; not allowed in this transition: timeout; q",
        ),
    ],
)
def test_texts_of_transition_errors(
    qp_type: QpType, before: QpState, after: QpState, attributes: QpAttrs, text: str
) -> None:
    limits = Limits(ports=2, pkeys=4, gids=8, mtu=Mtu.MTU_2048, max_rd_atomic=16, max_dest_rd_atomic=32, needs_gid=True)
    with pytest.raises(TransitionError) as caught:
        transition(qp_type, before, after, attributes, limits=limits)
    assert str(caught.value).startswith(
        f"cannot move a queue pair of type {qp_type.name} from {before.name} to {after.name}: "
    )
    assert text in str(caught.value)
    assert (caught.value.qp_type, caught.value.state, caught.value.wanted) == (qp_type, before, after)
    assert caught.value.reachable == reachable(qp_type, before)


def test_a_non_number_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        transition(RC, SQD, SQD, cast(QpAttrs, {"timeout": "long"}))


def test_attributes_are_not_changed_while_draining() -> None:
    with pytest.raises(TransitionError, match=r"wait for EventType\.SQ_DRAINED") as caught:
        transition(RC, SQD, SQD, {"timeout": 3}, draining=True)
    assert set(caught.value.wrong) == {"sq_draining"}
    assert transition(RC, SQD, SQD, {"timeout": 3}) == {"timeout": 3}
    assert transition(RC, SQD, RTS, {}, draining=True) == {}


def test_limits_of_a_device(inline: software.Context) -> None:
    device, port = inline.query_device(), inline.query_port(1)
    assert Limits.of(device, port) == Limits(
        ports=1, pkeys=1, gids=2, mtu=Mtu.MTU_4096, max_rd_atomic=16, max_dest_rd_atomic=16, needs_gid=True
    )
    vast = Limits.of(
        replace(device, max_qp_rd_atom=1000, max_qp_init_rd_atom=1000),
        replace(port, gid_tbl_len=1024, pkey_tbl_len=0, link_layer=LinkLayer.INFINIBAND),
    )
    assert vast == Limits(ports=1, pkeys=1)


def test_a_port_without_an_mtu_has_no_path() -> None:
    with pytest.raises(TransitionError, match="path_mtu: the port has no MTU: bring its network interface up"):
        transition(UC, INIT, RTR, PATH, limits=Limits(mtu=Mtu.NONE))
