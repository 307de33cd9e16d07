"""Closing a resource domain, or the domain below it, closes all parts in an order that the verbs accept."""

import asyncio
import warnings
from collections.abc import Awaitable, Callable

import pytest

from aioverbs import BusyResourceError, MemoryRegion, Resource, ResourceDomain, ResourceState, ThreadModel
from aioverbs._verbs.device import Device, open_device
from aioverbs._verbs.protection_domain import InterchangeableDomain
from tests.capabilities import Capability, needs

Over = Callable[[Device], Awaitable[list[InterchangeableDomain]]]
Make = Callable[[Device, ResourceDomain], Awaitable[list[Resource]]]


async def protection_domain(device: Device) -> list[InterchangeableDomain]:
    return [await device.protection_domain().open()]


async def parent_domain(device: Device) -> list[InterchangeableDomain]:
    pd = await device.protection_domain().open()
    return [pd, await pd.parent_domain().open()]


async def resource_domain(device: Device) -> list[InterchangeableDomain]:
    return [await device.resource_domain().open()]


async def no_parts(device: Device, domain: ResourceDomain) -> list[Resource]:
    return []


async def queues(device: Device, domain: ResourceDomain) -> list[Resource]:
    cq = await domain.completion_queue(64).open()
    return [cq, await domain.queue_pair(cq).open(), await domain.register(64).open()]


async def domains(device: Device, domain: ResourceDomain) -> list[Resource]:
    inner = await device.resource_domain(domain).open()
    parent = await domain.parent_domain().open()
    return [inner, await inner.completion_queue(4).open(), parent, await parent.completion_queue(4).open()]


@pytest.mark.parametrize("model", ThreadModel, ids=lambda model: model.value)
@pytest.mark.parametrize("over", [protection_domain, parent_domain, resource_domain])
@pytest.mark.parametrize("make", [no_parts, queues, domains])
@pytest.mark.parametrize("target", ["domain", "outermost", "base", "device"])
async def test_a_resource_domain_over_another_domain_ends_with_either(
    device_name: str, model: ThreadModel, over: Over, make: Make, target: str
) -> None:
    device = await open_device(device_name).open()
    outer = await over(device)
    outermost = outer[-1]
    counted: list[Resource] = [device, *outer, outermost.base]
    before = [each.statistics() for each in counted]
    domain = await device.resource_domain(outermost, thread_model=model).open()
    made = await make(device, domain)
    choices: dict[str, Resource] = {"domain": domain, "outermost": outermost, "base": outermost.base, "device": device}
    closed = choices[target]
    parts: list[Resource] = [domain.parent, *([domain.td] if domain.td is not None else [])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        await closed.aclose()
    opened: list[Resource] = [*outer, domain, *made]
    assert len(caught) == len([each for each in opened if each.closed and each is not closed])
    of_domain = [each for each in made if not isinstance(each, MemoryRegion)]  # regions belong to the base
    assert {each.state for each in (closed, domain, *parts, *of_domain)} == {ResourceState.CLOSED}
    if target in ("base", "device"):
        assert {each.state for each in made} <= {ResourceState.CLOSED}
    for resource in [*reversed(opened), device]:
        if closed is domain and resource is outermost:
            assert [each.statistics() for each in counted] == before
        await resource.aclose()


@needs(Capability.PARENT_DOMAINS)
@pytest.mark.parametrize("model", ThreadModel, ids=lambda model: model.value)
@pytest.mark.parametrize("part", ["pd", "parent"])
async def test_parts_of_a_resource_domain_with_queues_are_not_closed(
    device: Device, model: ThreadModel, part: str
) -> None:
    async with (
        device.resource_domain(thread_model=model) as domain,
        domain.completion_queue(4),
        domain.register(64) as region,
    ):
        with pytest.raises(BusyResourceError):
            await getattr(domain, part).aclose()
        assert {each.state for each in (domain, domain.pd, domain.parent, region)} == {ResourceState.OPEN}


async def test_a_protection_domain_with_a_resource_domain_of_another_loop_is_not_closed(device: Device) -> None:
    async def elsewhere(pd: InterchangeableDomain) -> None:
        async with device.resource_domain(pd):
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(close(), here))

    async def close() -> None:
        resources: list[Resource] = [domain.pd, domain, device]
        for each in resources:
            with pytest.raises(BusyResourceError, match=r"cannot be closed here: .* belongs to <Affinity of thread"):
                await each.aclose()
        assert {each.state for each in (domain, domain.parent, domain.pd, region, cq)} == {ResourceState.OPEN}

    here = asyncio.get_running_loop()
    async with device.resource_domain() as domain, domain.register(64) as region, domain.completion_queue(4) as cq:
        await asyncio.to_thread(asyncio.run, elsewhere(domain))
