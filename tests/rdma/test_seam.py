"""One machine-code path: the same handles on the software device, and on RDMA devices through libibverbs."""

import errno
from collections.abc import Iterator

import pytest

from aioverbs import SendFlags, SendOpcode, VerbsError, WcStatus
from aioverbs._core.handles import handles, parent_domain
from aioverbs._providers import hardware, sysfs
from tests.raw_verbs import post_recv, post_send
from tests.rdma.seam import Pair, opened, rdma_devices


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # Look up RDMA devices only if their tests were selected: libibverbs may be missing otherwise.
    if "device" not in metafunc.fixturenames:
        return
    wanted = metafunc.config.option.markexpr.startswith("rdma")
    devices = [pytest.param(name, marks=pytest.mark.rdma) for name in (rdma_devices() if wanted else ["rdma"])]
    metafunc.parametrize("device", ["soft0", *devices])


@pytest.fixture
def context(device: str) -> Iterator[handles.Context]:
    with opened(device) as context:
        yield context


@pytest.fixture(params=["basic", "extended"])
def pair(request: pytest.FixtureRequest, context: handles.Context) -> Pair:
    pd = handles.ProtectionDomain(context)
    return Pair(pd, pd, extended=request.param == "extended")


def test_queries(context: handles.Context, device: str) -> None:
    assert context.name == device
    assert context.query_device().max_qp > 1
    assert context.query_port(1).state.name == "ACTIVE"
    assert len(context.query_gid(1, 1)) == 16
    assert context.query_pkey(1, 0) == 0xFFFF
    with pytest.raises(VerbsError, match="ibv_query_port"):
        context.query_port(99)


def test_write_and_read(pair: Pair) -> None:
    pair.memory[0][:4096] = bytes(range(256)) * 16
    for opcode, local in ((SendOpcode.RDMA_WRITE, 0), (SendOpcode.RDMA_READ, 8192)):
        post_send(
            pair.qps[0],
            opcode,
            [pair.sge(0, local, 1000), pair.sge(0, local + 1000, 3096)],
            wr_id=1 << 63 | local,
            flags=SendFlags.SIGNALED,
            remote_addr=pair.regions[1].address + 16384,
            rkey=pair.regions[1].rkey,
        )
        assert pair.succeed(0).wr_id == 1 << 63 | local
    assert pair.memory[1][16384:20480] == pair.memory[0][:4096] == pair.memory[0][8192:12288]


def test_send_with_immediate_wakes_a_sleeper(pair: Pair) -> None:
    pair.queues[1].request_notify()
    post_recv(pair.qps[1], [pair.sge(1, 0, 64)], wr_id=7)
    pair.memory[0][:5] = b"hello"
    post_send(pair.qps[0], SendOpcode.SEND_WITH_IMM, [pair.sge(0, 0, 5)], flags=SendFlags.SIGNALED, imm_data=0x01020304)
    pair.sleep(1)
    received = pair.succeed(1)
    assert (received.wr_id, received.byte_len, received.imm_data) == (7, 5, 0x01020304)
    assert pair.memory[1][:5] == b"hello"
    pair.succeed(0)


def test_atomics(pair: Pair) -> None:
    pair.memory[1][:8] = (41).to_bytes(8, "little")
    for opcode, compare_add, swap, found in (
        (SendOpcode.ATOMIC_FETCH_AND_ADD, 1, 0, 41),
        (SendOpcode.ATOMIC_CMP_AND_SWP, 42, 7, 42),
    ):
        post_send(
            pair.qps[0],
            opcode,
            [pair.sge(0, 0, 8)],
            flags=SendFlags.SIGNALED,
            remote_addr=pair.regions[1].address,
            rkey=pair.regions[1].rkey,
            compare_add=compare_add,
            swap=swap,
        )
        pair.succeed(0)
        assert int.from_bytes(pair.memory[0][:8], "little") == found
    assert int.from_bytes(pair.memory[1][:8], "little") == 7


def test_bad_rkey_breaks_the_queue_pair(pair: Pair) -> None:
    for wr_id in (1, 2):
        post_send(
            pair.qps[0],
            SendOpcode.RDMA_WRITE,
            [pair.sge(0, 0, 8)],
            wr_id=wr_id,
            flags=SendFlags.SIGNALED,
            remote_addr=pair.regions[1].address,
            rkey=pair.regions[1].rkey ^ 0x5500,
        )
    assert [pair.wait(0).status for _ in range(2)] == [WcStatus.REM_ACCESS_ERR, WcStatus.WR_FLUSH_ERR]
    assert pair.qps[0].query().qp_state.name == "ERR"


@pytest.mark.rdma
class TestAbsent:
    """Verbs that kernel soft-RoCE lacks: the result is an errno, not a crash."""

    @pytest.fixture
    def context(self) -> Iterator[handles.Context]:
        with opened(rdma_devices()[0]) as context:
            if context.name.startswith("rxe"):
                yield context
            else:
                pytest.skip(f"{context.name} may support it")

    def test_thread_domain(self, context: handles.Context) -> None:
        with pytest.raises(VerbsError, match="ibv_alloc_td") as caught:
            parent_domain.ThreadDomain(context)
        assert caught.value.errno == errno.EOPNOTSUPP

    def test_parent_domain(self, context: handles.Context) -> None:
        pd = handles.ProtectionDomain(context)
        with pytest.raises(VerbsError, match="ibv_alloc_parent_domain") as caught:
            parent_domain.ParentDomain(pd)
        assert caught.value.errno == errno.EOPNOTSUPP

    def test_xrc_domain(self, context: handles.Context) -> None:
        with pytest.raises(VerbsError, match="ibv_open_xrcd") as caught:
            parent_domain.XrcDomain(context)
        assert caught.value.errno == errno.EOPNOTSUPP


@pytest.mark.rdma
def test_two_devices() -> None:
    names = rdma_devices()
    if len(names) < 2:
        pytest.skip("needs two RDMA devices")
    with opened(names[0]) as near, opened(names[1]) as far:
        pair = Pair(handles.ProtectionDomain(near), handles.ProtectionDomain(far))
        pair.memory[0][:] = b"\x5a" * len(pair.memory[0])
        post_send(
            pair.qps[0],
            SendOpcode.RDMA_WRITE,
            [pair.sge(0, 0, len(pair.memory[0]))],
            flags=SendFlags.SIGNALED,
            remote_addr=pair.regions[1].address,
            rkey=pair.regions[1].rkey,
        )
        pair.succeed(0)
        assert pair.memory[1] == pair.memory[0]
        pair.destroy()


@pytest.mark.rdma
def test_names() -> None:
    assert set(rdma_devices()) <= set(hardware.names())


@pytest.mark.rdma
def test_the_kernels_files_have_the_same_gid_table() -> None:
    name = rdma_devices()[0]
    with opened(name) as context:
        found = hardware.gid_table(context, 1)
    assert found
    assert sysfs.gid_table(name, 1) == found
