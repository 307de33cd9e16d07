"""The resource manager on an RDMA device, with the features that the device has or lacks."""

import asyncio
import dataclasses
import ipaddress
import logging
import sys
from collections.abc import Callable

import pytest

from aioverbs import (
    AccessFlags,
    AffinityError,
    DeviceNotFoundError,
    QpState,
    QpType,
    RemoteRegion,
    ThreadModel,
    TransitionError,
    VerbsError,
    WcStatus,
    WorkCompletionError,
    devices,
    open_device,
)
from tests.pace import patience
from tests.rdma.cm import address_of
from tests.rdma.seam import rdma_devices
from tests.running import run
from tests.waiting import wait_until

pytestmark = pytest.mark.rdma

REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


@pytest.fixture
def name() -> str:
    return rdma_devices()[0]


def test_the_device_is_listed(name: str) -> None:
    found = {each.name: each for each in devices()}
    assert found[name].provider == "hardware"
    assert found[name].active
    assert any(gid.startswith("::ffff:") for port in found[name].ports for _, gid in port.gids)
    assert "soft0" in found


def test_logging_configuration_is_unchanged(name: str) -> None:
    """Nothing imports pyverbs, which would configure the root logger."""
    program = f"""
import asyncio, logging, sys
from aioverbs import devices, open_device
async def main():
    async with open_device({name!r}):
        pass
devices()
asyncio.run(main())
root = logging.getLogger()
print(root.handlers, logging.getLevelName(root.level), "pyverbs" in sys.modules)
"""
    done = run([sys.executable, "-P", "-c", program], patience(30))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] WARNING False\n", "")


async def test_rdma_devices_come_before_the_software_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOVERBS_DEVICE", raising=False)
    async with open_device() as device:
        assert not device.software
    with pytest.raises(DeviceNotFoundError, match=r"available: .*soft0"):
        await open_device("mlx5_99").open()


async def test_a_neighbour_that_does_not_answer(name: str) -> None:
    """The kernel resolves the neighbour while the queue pair moves to RTR; the loop continues meanwhile."""
    nobody = ipaddress.ip_address(address_of(name).rpartition(".")[0] + ".223")
    async with (
        open_device(name) as device,
        device.resource_domain() as domain,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as qp,
    ):
        gid = bytes(10) + b"\xff\xff" + nobody.packed
        establishing = asyncio.create_task(qp.establish(dataclasses.replace(qp.local_endpoint(), gid=gid), REMOTE))
        turns = 0
        while not establishing.done():
            await asyncio.sleep(0.01)
            turns += 1
        with pytest.raises(VerbsError, match="ibv_modify_qp"):
            await establishing
        assert turns > 20
        assert qp.query().qp_state is QpState.INIT


@pytest.mark.parametrize("model", ThreadModel, ids=lambda model: model.name)
async def test_a_write(name: str, model: ThreadModel, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        open_device(name) as device,
        device.resource_domain(thread_model=model) as domain,
        domain.register(4096, REMOTE) as source,
        domain.register(4096, REMOTE) as target,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.local_endpoint(), REMOTE)
        far.connect(near.local_endpoint(), REMOTE)
        source.buffer[:5] = b"hello"
        await near.write(source[:5], target.remote()[:5])
        assert bytes(target.buffer[:5]) == b"hello"
        if model is ThreadModel.SINGLE:
            with pytest.raises(AffinityError, match="ibv_query_qp"):
                await asyncio.to_thread(near.query)
        with pytest.raises(WorkCompletionError) as caught:
            await near.write(source[:5], RemoteRegion(target.address, 5, target.rkey ^ 0x5500))
        assert caught.value.status is WcStatus.REM_ACCESS_ERR
    if not domain.native:
        assert any("not native" in record.getMessage() for record in caplog.records)
        assert all(record.levelno == logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("qp_type", [QpType.RC, QpType.UC, QpType.UD], ids=lambda qp_type: qp_type.name)
async def test_manual_state_transitions(name: str, qp_type: QpType) -> None:
    """The device accepts all transitions in the table of transitions, and has the state that the table says."""
    async with (
        open_device(name) as device,
        device.resource_domain() as domain,
        domain.register(64, REMOTE) as region,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq, qp_type=qp_type) as near,
        domain.queue_pair(cq, qp_type=qp_type) as far,
    ):
        remote = far.local_endpoint() if qp_type is not QpType.UD else None
        moves: list[tuple[Callable[[], None], QpState]] = [
            (near.to_init, QpState.INIT),
            (near.to_init, QpState.INIT),
            (lambda: near.to_rtr(remote), QpState.RTR),
            (near.to_rts, QpState.RTS),
            (near.to_rts, QpState.RTS),
            (near.to_sqd, QpState.SQD),
            (near.to_rts, QpState.RTS),
            (near.to_error, QpState.ERR),
            (near.to_error, QpState.ERR),
            (near.to_reset, QpState.RESET),
        ]
        for move, state in moves:
            move()
            assert near.qp_state is near.query().qp_state is state
            assert near.remote_endpoint == (None if state in (QpState.RESET, QpState.INIT) else remote)
            if state is not QpState.INIT:
                with pytest.raises(TransitionError, match="there is no such transition"):
                    near.to_rtr(remote)
        if remote is None:
            near.activate(qkey=0x1234)
            assert (near.qp_state, near.query().qkey) == (QpState.RTS, 0x1234)
            return
        far.connect(near.local_endpoint(), REMOTE)
        near.connect(remote, REMOTE)
        region.buffer[:2] = b"ok"
        await near.write(region[:2], region.remote()[32:34])
        wait_until(lambda: bytes(region.buffer[32:34]) == b"ok")


async def test_required_native_objects_fail_on_devices_without_them(name: str) -> None:
    (found,) = (each for each in devices() if each.name == name)
    async with open_device(name) as device:
        for what, resource in (
            ("thread domains", device.thread_domain(require_native=True)),
            ("XRC domains", device.xrc_domain()),
        ):
            if what in found.native:
                async with resource:
                    pass
            else:
                with pytest.raises(VerbsError, match="EOPNOTSUPP"):
                    await resource.open()
