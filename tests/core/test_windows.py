"""Memory windows: bound to a part of a region, used by peers, gone, and refused after."""

import pytest

from aioverbs import (
    AccessFlags,
    BusyResourceError,
    ClosedResourceError,
    MwType,
    QpState,
    SendFlags,
    SendOpcode,
    VerbsError,
    WcFlags,
    WcOpcode,
    WcStatus,
)
from aioverbs._core.handles import handles
from aioverbs._core.software import software
from tests.core.pairs import ALL_ACCESS, CAPABILITIES, End, connect, make_domain, make_end, succeed, wait_for

READ, WRITE, SIGNALED = SendOpcode.RDMA_READ, SendOpcode.RDMA_WRITE, SendFlags.SIGNALED
BINDABLE = AccessFlags.LOCAL_WRITE | AccessFlags.MW_BIND
REMOTE = AccessFlags.REMOTE_READ | AccessFlags.REMOTE_WRITE


@pytest.fixture
def pair(context: software.Context, kind: str) -> tuple[End, End]:
    """The far end's region may be bound, and is closed to peers by itself."""
    domain = make_domain(context, kind)
    near, far = make_end(domain), make_end(domain, access=BINDABLE)
    connect(near.qp, far.qp, ALL_ACCESS)
    return near, far


@pytest.fixture(params=MwType, ids=lambda kind: kind.name)
def window(request: pytest.FixtureRequest, pair: tuple[End, End]) -> handles.MemoryWindow:
    return handles.MemoryWindow(pair[1].pd, request.param)


def bind(
    far: End, window: handles.MemoryWindow, offset: int = 0, length: int = 64, access: AccessFlags = REMOTE
) -> handles.WorkCompletion:
    """Bind a window to a part of the far memory, and wait for it."""
    far.qp.bind_window(window, far.region, far.region.address + offset, length, access, wr_id=7, flags=SIGNALED)
    return wait_for(far.cq)[0]


def ask(near: End, opcode: SendOpcode, address: int, rkey: int, length: int = 8) -> WcStatus:
    near.qp.post_send(opcode, [near.sge(0, length)], remote_addr=address, rkey=rkey, flags=SIGNALED)
    return wait_for(near.cq)[0].status


def again(near: End, far: End) -> None:
    """Connect anew what a refusal broke."""
    for end in (near, far):
        end.qp.modify(QpState.RESET)
        assert end.cq.poll() == []
    connect(near.qp, far.qp, ALL_ACCESS)


def test_a_window_opens_a_part_of_a_region(pair: tuple[End, End], window: handles.MemoryWindow) -> None:
    near, far = pair
    before = window.rkey
    completion = bind(far, window, 100, 50)
    assert (completion.status, completion.opcode) == (WcStatus.SUCCESS, WcOpcode.BIND_MW)
    assert completion.wr_id == 7
    assert window.rkey != before
    assert window.rkey >> 8 == before >> 8
    near.memory[:8] = b"through!"
    assert ask(near, WRITE, far.region.address + 142, window.rkey) is WcStatus.SUCCESS
    assert far.memory[142:150] == b"through!"
    near.memory[:8] = bytes(8)
    assert ask(near, READ, far.region.address + 142, window.rkey) is WcStatus.SUCCESS
    assert near.memory[:8] == b"through!"


@pytest.mark.parametrize("outside", [99, 143])
def test_its_bounds(pair: tuple[End, End], window: handles.MemoryWindow, outside: int) -> None:
    near, far = pair
    bind(far, window, 100, 50)
    assert ask(near, WRITE, far.region.address + outside, window.rkey) is WcStatus.REM_ACCESS_ERR
    assert far.memory == bytes(4096)


def test_its_access(pair: tuple[End, End], window: handles.MemoryWindow) -> None:
    near, far = pair
    bind(far, window, access=AccessFlags.REMOTE_READ)
    assert ask(near, READ, far.region.address, window.rkey) is WcStatus.SUCCESS
    assert ask(near, WRITE, far.region.address, window.rkey) is WcStatus.REM_ACCESS_ERR


def test_the_key_of_before_is_refused(pair: tuple[End, End], window: handles.MemoryWindow) -> None:
    near, far = pair
    unbound = window.rkey
    bind(far, window)
    assert ask(near, READ, far.region.address, unbound) is WcStatus.REM_ACCESS_ERR


def test_a_window_of_type_1_moves_and_is_unbound(pair: tuple[End, End]) -> None:
    near, far = pair
    window = handles.MemoryWindow(far.pd, MwType.TYPE_1)
    bind(far, window)
    first = window.rkey
    bind(far, window, 64)
    assert ask(near, READ, far.region.address + 64, window.rkey) is WcStatus.SUCCESS
    assert ask(near, READ, far.region.address, first) is WcStatus.REM_ACCESS_ERR
    again(near, far)
    second = window.rkey
    far.qp.bind_window(window, None, 0, 0, 0, flags=SIGNALED)
    assert succeed(far.cq).opcode == WcOpcode.BIND_MW
    assert ask(near, READ, far.region.address + 64, second) is WcStatus.REM_ACCESS_ERR
    far.region.destroy()


def test_a_window_of_type_2_is_invalidated_here(pair: tuple[End, End]) -> None:
    near, far = pair
    window = handles.MemoryWindow(far.pd, MwType.TYPE_2)
    bind(far, window)
    key = window.rkey
    far.qp.post_send(SendOpcode.LOCAL_INV, invalidate_rkey=key, flags=SIGNALED)
    assert succeed(far.cq).opcode == WcOpcode.LOCAL_INV
    assert ask(near, READ, far.region.address, key) is WcStatus.REM_ACCESS_ERR
    again(near, far)
    bind(far, window)
    assert window.rkey != key
    assert ask(near, READ, far.region.address, window.rkey) is WcStatus.SUCCESS


def test_a_window_of_type_2_is_invalidated_by_the_peer(pair: tuple[End, End]) -> None:
    near, far = pair
    window = handles.MemoryWindow(far.pd, MwType.TYPE_2)
    bind(far, window)
    key = window.rkey
    far.qp.post_recv([far.sge(1000, 8)])
    near.memory[:4] = b"done"
    near.qp.post_send(SendOpcode.SEND_WITH_INV, [near.sge(0, 4)], invalidate_rkey=key, flags=SIGNALED)
    succeed(near.cq)
    received = succeed(far.cq)
    assert received.wc_flags == WcFlags.WITH_INV
    assert (received.invalidated_rkey, received.imm_data) == (key, 0)
    assert far.memory[1000:1004] == b"done"
    assert ask(near, READ, far.region.address, key) is WcStatus.REM_ACCESS_ERR


def test_extended_queues_tell_the_key_as_well(context: software.Context) -> None:
    domain = make_domain(context, "plain")
    near, far = make_end(domain), make_end(domain, access=BINDABLE, extended=True)
    connect(near.qp, far.qp)
    window = handles.MemoryWindow(domain, MwType.TYPE_2)
    bind(far, window)
    far.qp.post_recv()
    near.qp.post_send(SendOpcode.SEND_WITH_INV, invalidate_rkey=window.rkey)
    received = succeed(far.cq)
    assert (received.wc_flags, received.invalidated_rkey) == (WcFlags.WITH_INV, window.rkey)


def test_a_key_of_choice(pair: tuple[End, End]) -> None:
    near, far = pair
    window = handles.MemoryWindow(far.pd, MwType.TYPE_2)
    key = window.rkey ^ 0x80
    far.qp.bind_window(window, far.region, far.region.address, 8, REMOTE, flags=SIGNALED, rkey=key)
    succeed(far.cq)
    assert window.rkey == key
    assert ask(near, READ, far.region.address, key) is WcStatus.SUCCESS


def test_a_bound_window_of_type_2_is_not_bound_again(pair: tuple[End, End]) -> None:
    _, far = pair
    window = handles.MemoryWindow(far.pd, MwType.TYPE_2)
    bind(far, window)
    assert bind(far, window).status is WcStatus.MW_BIND_ERR


def test_a_window_of_type_2_serves_its_queue_pair_alone(pair: tuple[End, End]) -> None:
    near, far = pair
    window = handles.MemoryWindow(far.pd, MwType.TYPE_2)
    other, stranger = make_end(far.pd), make_end(far.pd)
    connect(other.qp, stranger.qp)
    bind(far, window)
    assert ask(other, READ, far.region.address, window.rkey) is WcStatus.REM_ACCESS_ERR
    assert ask(near, READ, far.region.address, window.rkey) is WcStatus.SUCCESS


@pytest.mark.parametrize("refusal", ["not bindable", "bounds", "no write in the region", "protection domain"])
def test_what_cannot_be_bound(context: software.Context, pair: tuple[End, End], kind: str, refusal: str) -> None:
    _, far = pair
    window = handles.MemoryWindow(far.pd, MwType.TYPE_2)
    region, length = far.region, 8
    match refusal:
        case "not bindable":
            region = handles.MemoryRegion(far.pd, far.memory, ALL_ACCESS)
        case "bounds":
            length = 4097
        case "no write in the region":
            region = handles.MemoryRegion(far.pd, far.memory, AccessFlags.MW_BIND)
        case "protection domain":
            region = handles.MemoryRegion(handles.ProtectionDomain(context), far.memory, BINDABLE)
    far.qp.bind_window(window, region, region.address, length, REMOTE)
    assert wait_for(far.cq)[0].status is WcStatus.MW_BIND_ERR


def test_a_region_stays_while_a_window_is_bound_to_it(pair: tuple[End, End], window: handles.MemoryWindow) -> None:
    _, far = pair
    bind(far, window)
    for _ in range(2):
        with pytest.raises(BusyResourceError, match="cannot be destroyed: a memory window is bound to it"):
            far.region.destroy()
        assert not far.region.closed
    window.destroy()
    far.region.destroy()


def test_a_window_goes_with_its_key(pair: tuple[End, End], window: handles.MemoryWindow) -> None:
    near, far = pair
    bind(far, window)
    key = window.rkey
    window.destroy()
    assert ask(near, READ, far.region.address, key) is WcStatus.REM_ACCESS_ERR


@pytest.mark.once
def test_arguments(pair: tuple[End, End]) -> None:
    _, far = pair
    first, second = (handles.MemoryWindow(far.pd, kind) for kind in MwType)
    address = far.region.address
    keys = [first.rkey, second.rkey]
    with pytest.raises(ValueError, match="chooses the key of a window of type 1"):
        far.qp.bind_window(first, far.region, address, 8, REMOTE, rkey=1)
    with pytest.raises(ValueError, match="bound to a region; without one"):
        far.qp.bind_window(second, None, address, 8, REMOTE)
    with pytest.raises(ValueError, match="bound by bind_window"):
        far.qp.post_send(SendOpcode.BIND_MW)
    with pytest.raises(VerbsError, match="ibv_post_send failed: EINVAL"):
        far.qp.bind_window(second, far.region, address, 8, REMOTE, rkey=second.rkey ^ 0x100)
    with pytest.raises(ValueError, match="3 is not a valid MwType"):
        handles.MemoryWindow(far.pd, 3)
    assert [first.rkey, second.rkey] == keys
    first.destroy()
    with pytest.raises(ClosedResourceError, match="MemoryWindow of type 1"):
        far.qp.bind_window(first, far.region, address, 8, REMOTE)
    assert far.cq.poll() == []


def test_a_full_queue_leaves_the_key(context: software.Context, kind: str) -> None:
    domain = make_domain(context, kind)
    near, far = make_end(domain, access=BINDABLE), make_end(domain)
    connect(near.qp, far.qp)
    for window in [handles.MemoryWindow(domain, kind) for kind in MwType]:
        near.qp.modify(QpState.SQD)
        for _ in range(CAPABILITIES.max_send_wr):
            near.qp.post_send(WRITE, flags=SIGNALED)
        key = window.rkey
        with pytest.raises(VerbsError, match="ENOMEM"):
            near.qp.bind_window(window, near.region, near.region.address, 8, REMOTE)
        assert window.rkey == key
        near.qp.modify(QpState.RTS)
        wait_for(near.cq, CAPABILITIES.max_send_wr)
