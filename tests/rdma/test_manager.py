"""The resource manager on an RDMA device, with the features that the device has or lacks."""

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, assert_type

import pytest

from aioverbs import (
    AccessFlags,
    AffinityError,
    BorrowedObjectClosedError,
    BrokenResourceError,
    Device,
    DeviceNotFoundError,
    MemoryRegion,
    ProtectionDomain,
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

if TYPE_CHECKING:
    from pyverbs.device import Context

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
    """Importing pyverbs would configure the root logger: the application's configuration must stay."""
    program = f"""
import asyncio, logging
from aioverbs import devices, open_device
async def main():
    async with open_device({name!r}):
        pass
devices()
asyncio.run(main())
root = logging.getLogger()
print(root.handlers, logging.getLevelName(root.level))
"""
    done = run([sys.executable, "-P", "-c", program], patience(30))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] WARNING\n", "")


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


async def test_using_a_context_of_the_user(name: str) -> None:
    import pyverbs.device

    context = pyverbs.device.Context(name=name)
    async with (
        Device.from_pyverbs(context) as device,
        device.resource_domain() as domain,
        domain.register(64, REMOTE) as region,
        domain.completion_queue(64) as cq,
        domain.queue_pair(cq) as near,
        domain.queue_pair(cq) as far,
    ):
        assert device.name == name
        near.connect(far.local_endpoint(), REMOTE)
        far.connect(near.local_endpoint(), REMOTE)
        region.buffer[:2] = b"ok"
        await near.write(region[:2], region.remote()[32:34])
        assert bytes(region.buffer[32:34]) == b"ok"
    # The object still belongs to the user.
    assert context.query_device().phys_port_cnt >= 1
    context.close()
    with pytest.raises(ValueError, match="context is closed"):
        await Device.from_pyverbs(context).open()
    with pytest.raises(TypeError, match=r"expected a pyverbs.device.Context, got str"):
        await Device.from_pyverbs("mlx5_0").open()  # type: ignore[arg-type]


def descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


class TestAdopting:
    """Objects that the user created with pyverbs, and closes."""

    @pytest.fixture
    def context(self, name: str) -> "Iterator[Context]":
        import pyverbs.device

        with pyverbs.device.Context(name=name) as context:
            yield context

    async def test_a_write_between_adopted_and_own_queue_pairs(self, context: "Context") -> None:
        from pyverbs.mr import MR
        from pyverbs.pd import PD
        from pyverbs.pyverbs_error import PyverbsError

        with PD(context) as adopted, MR(adopted, 4096, REMOTE) as mr:
            mr.write(b"hello", 5)
            async with (
                Device.from_pyverbs(context) as device,
                device.adopt_protection_domain(adopted) as pd,
                pd.adopt_memory_region(mr, REMOTE) as region,
                device.resource_domain(pd) as domain,
                domain.register(4096, REMOTE) as own,
                domain.completion_queue(64) as cq,
                domain.queue_pair(cq) as near,
                domain.queue_pair(cq) as far,
            ):
                near.connect(far.local_endpoint(), REMOTE)
                far.connect(near.local_endpoint(), REMOTE)
                assert_type(pd, ProtectionDomain)
                assert_type(region, MemoryRegion)
                assert (len(region), region.address, region.lkey, region.rkey) == (4096, mr.buf, mr.lkey, mr.rkey)
                await near.write(region[:5], own.remote()[:5])
                assert bytes(own.buffer[:5]) == b"hello"
                own.buffer[5:10] = b"again"
                await near.write(own[5:10], region.remote()[4090:4095])
                assert mr.read(5, 4090) == bytes(region.buffer[4090:4095]) == b"again"
                # pyverbs has closed the domain's memory regions before
                with pytest.raises(PyverbsError, match="Failed to dealloc PD"):
                    adopted.close()
                with pytest.raises(BorrowedObjectClosedError):
                    await near.write(region[:5], own.remote()[:5])
                await near.write(own[:5], own.remote()[64:69])
            assert adopted.handle >= 0
            with MR(adopted, 64, REMOTE) as another:
                assert another.lkey
        assert context.query_device().phys_port_cnt >= 1

    async def test_objects_that_cannot_be_adopted(self, context: "Context", name: str) -> None:
        import pyverbs.device
        from pyverbs.mr import MR
        from pyverbs.pd import PD

        with pyverbs.device.Context(name=name) as another, PD(another) as other:
            async with Device.from_pyverbs(context) as device, device.protection_domain() as pd:
                with pytest.raises(ValueError, match="belongs to a different context than"):
                    await device.adopt_protection_domain(other).open()
                mr = MR(other, 64, REMOTE)
                with pytest.raises(ValueError, match="belongs to a different protection domain than"):
                    await pd.adopt_memory_region(mr, REMOTE).open()
                mr.close()
                with pytest.raises(ValueError, match="the pyverbs memory region is closed"):
                    await pd.adopt_memory_region(mr, REMOTE).open()
                other.close()
                with pytest.raises(ValueError, match="the pyverbs protection domain is closed"):
                    await device.adopt_protection_domain(other).open()
                with pytest.raises(TypeError, match=r"expected a pyverbs\.pd\.PD, got Context"):
                    await device.adopt_protection_domain(context).open()  # type: ignore[arg-type]
                with pytest.raises(TypeError, match=r"expected a pyverbs\.mr\.MR, got PD"):
                    await pd.adopt_memory_region(other, REMOTE).open()  # type: ignore[arg-type]

    async def test_a_protection_domain_that_is_closed_first(self, context: "Context") -> None:
        from pyverbs.mr import MR
        from pyverbs.pd import PD

        adopted = PD(context)
        mr = MR(adopted, 64, REMOTE)
        async with (
            Device.from_pyverbs(context) as device,
            device.adopt_protection_domain(adopted) as pd,
            pd.adopt_memory_region(mr, REMOTE) as region,
        ):
            adopted.close()
            for ask in (region.remote, lambda: region.buffer, lambda: region[:5].sge):
                with pytest.raises(BorrowedObjectClosedError):
                    ask()
            for resource in (pd.register(64), device.resource_domain(pd)):
                with pytest.raises(BorrowedObjectClosedError):
                    await resource.open()
            async with device.protection_domain() as own, own.register(64):
                pass

    async def test_a_context_that_is_closed_first(self, context: "Context") -> None:
        before = descriptors()
        async with contextlib.AsyncExitStack() as stack:
            device = await stack.enter_async_context(Device.from_pyverbs(context))
            domain = await stack.enter_async_context(device.resource_domain())
            own = await stack.enter_async_context(domain.register(64, REMOTE))
            cq = await stack.enter_async_context(domain.completion_queue(64))
            near = await stack.enter_async_context(domain.queue_pair(cq))
            async with domain.queue_pair(cq) as far:
                near.connect(far.local_endpoint(), REMOTE)
                far.connect(near.local_endpoint(), REMOTE)
                await near.write(own[:5], own.remote()[5:10])
            pending = asyncio.ensure_future(near.write(own[:5], own.remote()[5:10]))  # not answered by any peer
            await asyncio.sleep(0)
            context.close()
            for ask in (
                near.query,
                device.events,
                device.protection_domain,
                cq.handle.request_notify,
                near.local_endpoint,
            ):
                with pytest.raises(BorrowedObjectClosedError):
                    ask()
            with pytest.raises(BorrowedObjectClosedError):
                await near.write(own[:5], own.remote()[5:10])
            for resource in (domain.register(64), domain.completion_queue(64)):
                with pytest.raises(BorrowedObjectClosedError):
                    await resource.open()
            with pytest.warns(ResourceWarning, match="was closed by its lender before the objects made from it"):
                await stack.aclose()
        with pytest.raises(BrokenResourceError):
            await pending
        assert device.closed
        assert descriptors() == before - 2  # the context's own
