"""Requests beyond the limits of a device are refused before the verb; the message has the limit."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import pytest_asyncio

from aioverbs import CompletionQueue, Device, QpCapabilities, QpType, ResourceDomain, TransitionError, VerbsError
from aioverbs._verbs.capability_checks import check_completion_queue, check_queue_pair, check_shared_receive_queue
from aioverbs.attributes import DeviceAttributes
from tests.capabilities import Capability, capabilities
from tests.waiting import wait_until


@pytest_asyncio.fixture
async def domain(device: Device) -> AsyncIterator[ResourceDomain]:
    async with device.resource_domain() as domain:
        yield domain


@pytest_asyncio.fixture
async def cq(domain: ResourceDomain) -> AsyncIterator[CompletionQueue]:
    async with domain.completion_queue(256) as cq:
        yield cq


@contextmanager
def no_verb(device: Device, *verbs: str) -> Iterator[None]:
    """Check that none of these verbs is called, on devices that count calls."""
    if Capability.FAULT_PLAN not in capabilities(device.name):
        yield
        return
    faults = device.faults
    faults.count_calls()
    yield
    assert [faults.calls(verb) for verb in verbs] == [0] * len(verbs)
    faults.count_calls(False)


def exceeding(value: int) -> str:
    """Return the pattern of the error for one more than `value`."""
    return f"must be at most {value:,} for .*, got {value + 1:,}"


async def test_queue_pairs(device: Device, domain: ResourceDomain, cq: CompletionQueue) -> None:
    has = device.attributes()
    for name, most in (
        ("max_send_wr", has.max_qp_wr),
        ("max_recv_wr", has.max_qp_wr),
        ("max_send_sge", has.max_sge),
        ("max_recv_sge", has.max_sge),
    ):
        wanted = replace(QpCapabilities(), **{name: most + 1})
        with no_verb(device, "create_qp"), pytest.raises(ValueError, match=f"^`{name}` {exceeding(most)}"):
            await domain.queue_pair(cq, capabilities=wanted).open()
        for negative in (-1, -(1 << 40)):
            with pytest.raises(ValueError, match=f"`{name}` must be 0 or more for {device.name}, got {negative:,}"):
                await domain.queue_pair(cq, capabilities=replace(wanted, **{name: negative})).open()
    both = QpCapabilities(max_send_sge=has.max_sge + 1, max_recv_sge=has.max_sge + 2)
    with pytest.raises(ValueError, match=r"`max_send_sge` must be .*; `max_recv_sge` must be "):
        await domain.queue_pair(cq, capabilities=both).open()
    assert cq.statistics().reserved == 0


async def test_a_queue_pair_at_the_limits(device: Device, domain: ResourceDomain, cq: CompletionQueue) -> None:
    most = device.attributes().max_sge
    async with domain.queue_pair(cq, capabilities=QpCapabilities(max_send_sge=most, max_recv_sge=most)) as qp:
        assert qp.capabilities.max_send_sge >= most
        assert qp.capabilities.max_recv_sge >= most
    # One entry is used for the GRH of datagrams.
    for least, works in ((most - 1, True), (most, False)):
        datagrams = domain.queue_pair(cq, capabilities=QpCapabilities(max_recv_sge=least), qp_type=QpType.UD)
        if works:
            async with datagrams:
                pass
        else:
            with pytest.raises(ValueError, match=f"`max_recv_sge` {exceeding(most - 1)}"):
                await datagrams.open()


async def test_inline_data(device: Device, domain: ResourceDomain, cq: CompletionQueue) -> None:
    """Devices do not report the limit of inline data; a binary search finds it."""
    low, high = 0, 1 << 20  # granted, refused
    refused: list[tuple[int, str]] = []
    while high - low > 1:
        middle = (low + high) // 2
        try:
            async with domain.queue_pair(cq, capabilities=QpCapabilities(max_inline_data=middle)) as qp:
                low = max(middle, min(qp.capabilities.max_inline_data, high - 1))
        except VerbsError as error:
            refused.append((middle, str(error)))
            high = middle
    assert refused
    for size, says in refused:
        assert f"max_inline_data of {size:,} bytes may exceed its limit: ask for less" in says
    assert low >= 64
    async with domain.queue_pair(cq, capabilities=QpCapabilities(max_inline_data=low)) as qp:
        assert qp.capabilities.max_inline_data == low
    with pytest.raises(ValueError, match=f"`max_inline_data` must be 0 or more for {device.name}, got -1"):
        await domain.queue_pair(cq, capabilities=QpCapabilities(max_inline_data=-1)).open()


async def test_reads_and_atomics_in_flight(device: Device, domain: ResourceDomain, cq: CompletionQueue) -> None:
    has = device.attributes()
    async with domain.queue_pair(cq) as near, domain.queue_pair(cq) as far:
        endpoint = near.local_endpoint()
        requests, serves = min(has.max_qp_init_rd_atom, 255), min(has.max_qp_rd_atom, 255)
        assert (endpoint.max_rd_atomic, endpoint.max_dest_rd_atomic) == (requests, serves)
        for name, most in (("max_rd_atomic", requests), ("max_dest_rd_atomic", serves)):
            with (
                no_verb(device, "modify_qp"),
                pytest.raises(TransitionError, match=f"{name}: must be 0 to {most}, got {most + 1}"),
            ):
                near.connect(far.local_endpoint(), **{name: most + 1})  # type: ignore[arg-type]
        near.connect(far.local_endpoint())
        found = near.query()
        assert (found.max_rd_atomic, found.max_dest_rd_atomic) == (min(requests, serves), min(requests, serves))


async def test_soft_roce_read_depth_is_not_raised(
    device: Device, domain: ResourceDomain, cq: CompletionQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does not enlarge the table of a queue pair's reads, and would write beyond its end."""
    monkeypatch.setattr("aioverbs._verbs.quirks.is_soft_roce", lambda context: True)
    async with domain.queue_pair(cq) as near, domain.queue_pair(cq) as far:
        remote = far.local_endpoint()
        assert near.local_endpoint().max_dest_rd_atomic > 4, "no table exists before the first connect"
        near.connect(remote, max_dest_rd_atomic=4)
        near.to_sqd()
        wait_until(lambda: not near.query().sq_draining)
        with (
            no_verb(device, "modify_qp"),
            pytest.raises(TransitionError, match=r"0 to 4, got 5; soft-RoCE cannot exceed"),
        ):
            near.to_sqd(max_dest_rd_atomic=5)
        near.to_sqd(max_dest_rd_atomic=2)
        near.to_error()
        near.to_reset()
        assert near.local_endpoint().max_dest_rd_atomic == 2
        with no_verb(device, "modify_qp"), pytest.raises(TransitionError, match=r"got 4; .* make a new queue pair"):
            near.connect(remote, max_dest_rd_atomic=4)
        near.connect(remote)
        assert near.query().max_dest_rd_atomic == 2


async def test_completion_queues(device: Device, domain: ResourceDomain, cq: CompletionQueue) -> None:
    most = device.attributes().max_cqe
    with no_verb(device, "create_cq", "create_cq_ex"), pytest.raises(ValueError, match=f"^`depth` {exceeding(most)}"):
        await domain.completion_queue(most + 1).open()
    with no_verb(device, "resize_cq"), pytest.raises(ValueError, match=f"^`depth` {exceeding(most)}"):
        cq.resize(most + 1)
    vectors = device.handle.num_comp_vectors
    for vector in (-1, vectors):
        with pytest.raises(ValueError, match=f"^`comp_vector` must be .* got {vector}"):
            await domain.completion_queue(16, comp_vector=vector).open()
    async with domain.completion_queue(16, comp_vector=vectors - 1):
        pass


async def test_shared_receive_queues(device: Device, domain: ResourceDomain) -> None:
    has = device.attributes()
    for max_wr, max_sge, says in (
        (has.max_srq_wr + 1, 1, f"^`max_wr` {exceeding(has.max_srq_wr)}"),
        (16, has.max_srq_sge + 1, f"^`max_sge` {exceeding(has.max_srq_sge)}"),
        (-1, 1, f"^`max_wr` must be 0 or more for {device.name}, got -1"),
    ):
        with no_verb(device, "create_srq"), pytest.raises(ValueError, match=says):
            await domain.shared_receive_queue(max_wr, max_sge).open()
    async with domain.shared_receive_queue(16, has.max_srq_sge):
        pass


async def test_limits_of_a_smaller_device(device: Device) -> None:
    """The checks use the limits of the given device."""
    less: DeviceAttributes = replace(
        device.attributes(), max_qp_wr=100, max_sge=3, max_cqe=200, max_srq_wr=50, max_srq_sge=2
    )
    check_queue_pair("nic0", less, QpCapabilities(100, 100, 3, 3), QpType.RC)
    check_queue_pair("nic0", less, QpCapabilities(100, 999, 3, 999), QpType.RC, receives=False)
    with pytest.raises(ValueError, match=r"^`max_recv_sge` must be at most 2 for nic0, got 3$"):
        check_queue_pair("nic0", less, QpCapabilities(100, 100, 3, 3), QpType.UD)
    with pytest.raises(ValueError, match=r"^`max_send_wr` must be at most 100 for nic0, got 1,000$"):
        check_queue_pair("nic0", less, QpCapabilities(1000), QpType.RC)
    check_completion_queue("nic0", less, 200, comp_vector=7, comp_vectors=8)
    with pytest.raises(ValueError, match=r"^`depth` must be at most 200 for nic0, got 201$"):
        check_completion_queue("nic0", less, 201)
    with pytest.raises(ValueError, match=r"^`comp_vector` must be at most 7 for nic0, got 8$"):
        check_completion_queue("nic0", less, 200, comp_vector=8, comp_vectors=8)
    check_shared_receive_queue("nic0", less, 50, 2, 50)
    with pytest.raises(
        ValueError, match=r"^`max_wr` must be at most 50 for nic0, got 51; `max_sge` must be at most 2 for nic0, got 3"
    ):
        check_shared_receive_queue("nic0", less, 51, 3, 0)
