"""Specification of resource domains: one test for each sentence."""

import asyncio
import itertools

import pytest

from aioverbs import AffinityError, MessageModel, ThreadModel, VerbsError
from aioverbs._core.handles import handles
from aioverbs._verbs.device import Device
from tests.capabilities import Capability, needs

MODELS = list(zip(itertools.cycle(ThreadModel), MessageModel, strict=False))


@needs(Capability.PARENT_DOMAINS)
@pytest.mark.parametrize(("threads", "messages"), MODELS, ids=lambda model: model.name)
async def test_queues_and_queue_pairs_are_associated_with_it_when_they_are_made(
    device: Device, threads: ThreadModel, messages: MessageModel
) -> None:
    """ "Resource domain is a verb object that may be associated with QP and CQ objects upon creation to enhance data-
    path performance." """
    async with device.resource_domain(thread_model=threads, message_model=messages) as domain:
        queue = handles.CompletionQueue(device.handle, 4, parent_domain=domain.handle)
        qp = handles.QueuePair(domain.handle, queue, queue)
        assert (domain.thread_model, domain.message_model) == (threads, messages)
        assert queue.affinity is qp.affinity is domain.owner
        qp.destroy()
        queue.destroy()


async def test_safe(device: Device) -> None:
    """ "Access to the associated objects are thread safe. Such objects may be accessed by any thread without concern
    for thread safety issues." """
    async with device.resource_domain(thread_model=ThreadModel.SAFE) as domain:
        queue = handles.CompletionQueue(device.handle, 4, parent_domain=domain.handle)
        await asyncio.gather(*(asyncio.to_thread(queue.resize, 4) for _ in range(32)))
        queue.destroy()
    assert device.statistics().overlaps == 0


async def test_unsafe(device: Device) -> None:
    """ "Access to the associated objects are not thread safe. Access to such objects must be coordinated by the
    calling threads": one at a time, from any thread.
    (tests/manager/test_domains.py tests that overlapping calls are refused.)"""
    async with device.resource_domain(thread_model=ThreadModel.UNSAFE) as domain:
        queue = handles.CompletionQueue(device.handle, 4, parent_domain=domain.handle)
        for _ in range(8):
            await asyncio.to_thread(queue.resize, 4)
            queue.resize(4)
        await asyncio.to_thread(queue.destroy)


@needs(Capability.PARENT_DOMAINS)
async def test_single(device: Device) -> None:
    """ "Access to the associated objects are from only one thread over the lifetime of the object. In addition,
    different objects associated with the same resource domain must be called by the same thread." """
    async with device.resource_domain(thread_model=ThreadModel.SINGLE) as domain:
        first, second = (handles.CompletionQueue(device.handle, 4, parent_domain=domain.handle) for _ in range(2))
        for queue in (first, second):
            with pytest.raises(AffinityError):
                await asyncio.to_thread(queue.resize, 4)
            queue.resize(4)
        with pytest.raises(AffinityError, match="ibv_create_cq_ex"):
            await asyncio.to_thread(handles.CompletionQueue, device.handle, 4, parent_domain=domain.handle)
        with pytest.raises(AffinityError, match="ibv_destroy_cq"):
            await asyncio.to_thread(first.destroy)
        first.destroy()
        second.destroy()


def test_the_thread_models_are_those_of_the_document() -> None:
    """ "Thread model - defines the threading module for the objects (QP/CQ) associated with this resource domain." """
    assert [model.name for model in ThreadModel] == ["SAFE", "UNSAFE", "SINGLE"]


def test_the_message_models_are_those_of_the_document() -> None:
    """ "Message model - defines whether associated objects connection is optimized for low latency or high
    bandwidth": forced to low latency, suggested low latency, suggested high bandwidth, the provider's
    default."""
    assert [model.name for model in MessageModel] == ["FORCE_LOW_LATENCY", "LOW_LATENCY", "HIGH_BANDWIDTH", "DEFAULT"]


async def test_queue_pairs_and_completion_queues_of_a_domain_have_its_message_model(device: Device) -> None:
    """ "defines whether associated objects connection is optimized for low latency or high bandwidth": queue
    pairs and completion queues of a domain have the same message model."""
    async with (
        device.protection_domain() as pd,
        device.resource_domain(pd, message_model=MessageModel.LOW_LATENCY) as domain,
        device.resource_domain(pd, message_model=MessageModel.HIGH_BANDWIDTH) as another,
        domain.completion_queue(64) as cq,
        domain.completion_queue(64, message_model=MessageModel.DEFAULT) as with_its_own,
        another.completion_queue(64) as of_another,
        pd.completion_queue(64) as of_pd,
    ):
        assert cq.message_model is MessageModel.LOW_LATENCY
        for wrong in (with_its_own, of_another, of_pd):
            both = rf"queue pair has the message model LOW_LATENCY, .* has {wrong.message_model.name}: make"
            for queues in ((wrong,), (cq, wrong), (wrong, cq)):
                with pytest.raises(ValueError, match=both):
                    domain.queue_pair(*queues)
        # Protection domains and the domain's parent domain have no message model, so they accept any.
        async with pd.queue_pair(of_pd), domain.parent.queue_pair(cq, with_its_own), domain.queue_pair(cq):
            pass


@needs(Capability.XRC_DOMAINS)
async def test_xrc_shared_receive_queues_have_its_message_model(device: Device) -> None:
    """ "associated objects" """
    async with (
        device.xrc_domain() as xrc_domain,
        device.resource_domain(message_model=MessageModel.LOW_LATENCY) as domain,
        domain.completion_queue(64) as cq,
        domain.completion_queue(64, message_model=MessageModel.DEFAULT) as wrong,
    ):
        with pytest.raises(ValueError, match=r"receive queue has the message model LOW_LATENCY, .* has DEFAULT"):
            domain.shared_receive_queue(16, xrc_domain=xrc_domain, cq=wrong)
        async with domain.shared_receive_queue(16, xrc_domain=xrc_domain, cq=cq):
            pass


async def test_the_example(device: Device) -> None:
    """ "Example - creating a CQ and QP that may be called from one thread only" """
    async with device.resource_domain(
        thread_model=ThreadModel.SINGLE, message_model=MessageModel.HIGH_BANDWIDTH
    ) as domain:
        cq = handles.CompletionQueue(device.handle, 128, parent_domain=domain.handle)
        qp = handles.QueuePair(domain.handle, cq, cq)
        assert qp.query().qp_state == 0
        qp.destroy()
        cq.destroy()


@needs(Capability.FAULT_PLAN)
async def test_creating_one_may_fail(device: Device) -> None:
    """ "if (!_domain) { fprintf(stderr, "Can't create resource domain\\n")" """
    for verb in ("alloc_pd", "alloc_td", "alloc_parent_domain"):
        device.faults.fail(verb, 5)
        with pytest.raises(VerbsError, match=f"ibv_{verb} failed: EIO"):
            await device.resource_domain().open()
        assert not any(count for _, count in device.statistics().objects)
