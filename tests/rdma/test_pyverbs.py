"""Objects that the user created with pyverbs: contexts, protection domains and memory regions."""

import asyncio
import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_type

import pytest

from aioverbs import (
    AccessFlags,
    BorrowedObjectClosedError,
    BrokenResourceError,
    Device,
    MemoryRegion,
    ProtectionDomain,
)
from aioverbs._core.handles import handles, pyverbs_bridge
from tests.rdma.seam import rdma_devices

if TYPE_CHECKING:
    from pyverbs.device import Context

pytestmark = pytest.mark.rdma

REMOTE = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE
DISTRIBUTION = Path(os.environ.get("AIOVERBS_RDMA_RELEASE", "/"), "usr/lib/python3/dist-packages/pyverbs")


@pytest.fixture(scope="module", autouse=True)
def pyverbs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make the distribution's pyverbs importable, and none of its other packages.

    A build of pyverbs fits one version of Python and one release of libibverbs; another one is a reason to skip.
    """
    if importlib.util.find_spec("pyverbs") is not None:
        yield
        return
    endings = [ending for ending in importlib.machinery.EXTENSION_SUFFIXES if "cpython" in ending]
    if not any((DISTRIBUTION / f"device{ending}").exists() for ending in endings):
        pytest.skip(f"{DISTRIBUTION} is missing, or was built for another Python")
    folder = tmp_path_factory.mktemp("pyverbs")
    (folder / "pyverbs").symlink_to(DISTRIBUTION, target_is_directory=True)
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture
def name() -> str:
    return rdma_devices()[0]


@pytest.fixture
def context(name: str) -> "Iterator[Context]":
    import pyverbs.device

    with pyverbs.device.Context(name=name) as context:
        yield context


def test_context_capsule(name: str) -> None:
    import pyverbs.device

    with pyverbs.device.Context(name=name) as theirs:
        ours = handles.Context.adopt(pyverbs_bridge.context_capsule(theirs), theirs)
        assert ours.name == name
        assert ours.num_comp_vectors == theirs.num_comp_vectors
        assert ours.query_device().max_qp == theirs.query_device().max_qp
        ours.destroy()
        assert theirs.query_device().phys_port_cnt >= 1, "the user's context stays open"
    with pytest.raises(ValueError, match="closed"):
        pyverbs_bridge.context_capsule(theirs)


def test_other_types_are_refused() -> None:
    something_else: Any = object()
    with pytest.raises(TypeError, match=r"pyverbs\.device\.Context"):
        pyverbs_bridge.context_capsule(something_else)


def test_pyverbs_structures_have_the_expected_layout() -> None:
    """The structure behind the pointer agrees with the attributes of the object; otherwise these raise."""
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD

    with Context(name=rdma_devices()[0]) as context, PD(context) as pd, MR(pd, 64, 1) as mr:
        for capsule in (
            pyverbs_bridge.context_capsule(context),
            pyverbs_bridge.pd_capsule(pd),
            pyverbs_bridge.mr_capsule(mr),
        ):
            assert type(capsule).__name__ == "PyCapsule"
    with pytest.raises(ValueError, match="is closed"):
        pyverbs_bridge.context_capsule(context)
    with pytest.raises(ValueError, match="is closed"):
        pyverbs_bridge.pd_capsule(pd)


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
