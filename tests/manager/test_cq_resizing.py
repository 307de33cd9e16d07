"""Resizing a completion queue during a resize: from its allocator, or from a signal handler."""

from collections.abc import Callable

import pytest

from aioverbs import ConcurrentAccessError, Device, ThreadModel
from aioverbs.allocators import USE_DEFAULT, UseDefault
from tests.capabilities import Capability, needs

pytestmark = [pytest.mark.timeout(60), needs(Capability.PARENT_DOMAINS)]  # for allocators


class ReentrantAllocator:
    """Allocator that calls `next` during the next allocation."""

    def __init__(self) -> None:
        self.next: Callable[[], object] | None = None

    def allocate(self, size: int, alignment: int, resource_type: int, *parent: object) -> UseDefault:
        ask, self.next = self.next, None
        if ask is not None:
            ask()
        return USE_DEFAULT

    def free(self, address: int, resource_type: int, *parent: object) -> None:
        """Do nothing: all memory came from the default allocator."""


@pytest.mark.parametrize("model", [ThreadModel.SINGLE, ThreadModel.UNSAFE])
async def test_resize_from_its_allocator(device: Device, model: ThreadModel) -> None:
    allocator, asked = ReentrantAllocator(), list[str]()
    async with (
        device.resource_domain(thread_model=model, allocator=allocator) as domain,
        domain.completion_queue(64) as cq,
    ):

        def ask() -> None:
            with pytest.raises(ConcurrentAccessError, match="ibv_resize_cq"):
                cq.resize(1000)
            asked.append("refused")

        allocator.next = ask
        cq.resize(128)
        assert asked == ["refused"]
        assert cq.statistics().depth == cq.handle.cqe >= 128


async def test_resize_from_its_allocator_on_a_shared_queue(device: Device) -> None:
    """Reservations during the resize must fit into the new depth."""
    allocator = ReentrantAllocator()
    async with (
        device.resource_domain(thread_model=ThreadModel.SAFE, allocator=allocator) as domain,
        domain.completion_queue(1000) as cq,
    ):

        def reserve() -> None:
            cq._reserve(60)
            with pytest.raises(ValueError, match="make it deeper"):
                cq._reserve(60)
            cq.resize(2000)

        allocator.next = reserve
        cq.resize(64)
        assert (cq.statistics().depth, cq.statistics().reserved) == (cq.handle.cqe, 60)
        assert 64 <= cq.handle.cqe < 1000
        cq._release(60)


async def test_resize_from_a_signal_handler(device: Device) -> None:
    async with device.resource_domain() as domain, domain.completion_queue(64) as cq:
        with cq._reservation_lock:
            cq.resize(128)
            cq._reserve(100)
        assert (cq.statistics().depth, cq.statistics().reserved) == (cq.handle.cqe, 100)
        with pytest.raises(ValueError, match=r"must be at least 100 for .*, got 99$"):
            cq.resize(99)
        cq._release(100)
        cq.resize(64)
