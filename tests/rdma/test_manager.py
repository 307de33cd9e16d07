"""The resource manager on an RDMA device: with what it has natively, and without what it has not."""

import asyncio
import logging

import pytest

from aioverbs import (
    AccessFlags,
    AffinityError,
    Device,
    DeviceNotFoundError,
    RemoteRegion,
    ThreadModel,
    VerbsError,
    WcStatus,
    WorkCompletionError,
    devices,
    open_device,
)
from tests.rdma.seam import rdma_devices

pytestmark = pytest.mark.rdma

REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


@pytest.fixture
def name() -> str:
    return rdma_devices()[0]


def test_it_is_listed(name: str) -> None:
    found = {each.name: each for each in devices()}
    assert found[name].provider == "hardware"
    assert found[name].active
    assert any(gid.startswith("::ffff:") for port in found[name].ports for _, gid in port.gids)
    assert "soft0" in found


async def test_it_comes_before_the_software_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOVERBS_DEVICE", raising=False)
    async with open_device() as device:
        assert not device.software
    with pytest.raises(DeviceNotFoundError, match=r"here are: .*soft0"):
        await open_device("mlx5_99").open()


@pytest.mark.parametrize("model", ThreadModel, ids=lambda model: model.name)
async def test_a_write(name: str, model: ThreadModel, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        open_device(name) as device,
        device.resource_domain(thread_model=model) as domain,
        domain.register(4096, REMOTE) as source,
        domain.register(4096, REMOTE) as target,
        domain.completion_queue(16) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        near.connect(far.address, REMOTE)
        far.connect(near.address, REMOTE)
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


async def test_what_must_be_native_says_so(name: str) -> None:
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


async def test_over_a_context_of_the_user(name: str) -> None:
    import pyverbs.device

    context = pyverbs.device.Context(name=name)
    async with (
        Device.from_pyverbs(context) as device,
        device.resource_domain() as domain,
        domain.register(64, REMOTE) as region,
        domain.completion_queue(16) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        assert device.name == name
        near.connect(far.address, REMOTE)
        far.connect(near.address, REMOTE)
        region.buffer[:2] = b"ok"
        await near.write(region[:2], region.remote()[32:34])
        assert bytes(region.buffer[32:34]) == b"ok"
    # It is the user's still.
    assert context.query_device().phys_port_cnt >= 1
    context.close()
    with pytest.raises(ValueError, match="context is closed"):
        await Device.from_pyverbs(context).open()
    with pytest.raises(TypeError, match=r"a pyverbs.device.Context is needed, not str"):
        await Device.from_pyverbs("mlx5_0").open()  # type: ignore[arg-type]
