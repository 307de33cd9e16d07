"""Hundreds of event loops, each with a domain of its own, in one process."""

import asyncio
import resource
from collections.abc import Callable, Iterator

import pytest

from aioverbs import AffinityError, Device, ResourceDomain, open_device
from aioverbs._core.handles import handles
from tests.conftest import LOOP_FACTORIES

LOOPS = 250


@pytest.fixture
def descriptors() -> Iterator[int]:
    """Raise the limit of descriptors; return how many loops, with a few descriptors each, fit into the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield min(LOOPS, hard // 8) if hard != resource.RLIM_INFINITY else LOOPS
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("factory", LOOP_FACTORIES.values(), ids=LOOP_FACTORIES)
def test_a_domain_for_each_loop(descriptors: int, factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def enter() -> Device:
        return await open_device("soft0").open()

    async def make() -> ResourceDomain:
        return await device.resource_domain().open()

    async def use(domain: ResourceDomain, another: ResourceDomain) -> None:
        async with domain.completion_queue(4):
            pass
        with pytest.raises(AffinityError):
            await another.completion_queue(4).open()

    async def close(domain: ResourceDomain) -> None:
        await domain.aclose()

    first, *others = (factory() for _ in range(descriptors))
    try:
        device = first.run_until_complete(enter())
        domains = [loop.run_until_complete(make()) for loop in (first, *others)]
        assert len({id(domain.owner) for domain in domains}) == descriptors
        assert device.statistics().native_thread_domains == descriptors
        assert len(device.resources().children) == descriptors
        for position, (loop, domain) in enumerate(zip((first, *others), domains, strict=True)):
            loop.run_until_complete(use(domain, domains[position - 1]))
        for loop, domain in zip((first, *others), domains, strict=True):
            loop.run_until_complete(close(domain))
        assert not any(count for _, count in device.statistics().objects)
        first.run_until_complete(device.aclose())
    finally:
        for loop in (first, *others):
            loop.close()
    assert handles.open_handles() == []
