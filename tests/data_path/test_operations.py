"""Each operation on each type of queue pair that has it, with each thread model and message model."""

import itertools
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from aioverbs import AccessFlags, Device, MessageModel, MwType, QpType, ThreadModel, WcStatus, WorkCompletionError
from tests.capabilities import Capability, capabilities, marks_of, needs, qp_types
from tests.data_path.ends import CONNECTED, TYPES, Ends, ends


def each_type(*types: QpType) -> pytest.MarkDecorator:
    """Parametrize over queue pair types and thread models, and over the message models in turn."""
    message_models = itertools.cycle(MessageModel)
    return pytest.mark.parametrize(
        ("qp_type", "thread_model", "message_model"),
        [
            pytest.param(qp_type, thread, message, id=f"{qp_type.name}-{thread.name}-{message.name}", marks=marks)
            for qp_type, thread in itertools.product(types, ThreadModel)
            for message, marks in [(next(message_models), marks_of(qp_type))]
        ],
    )


@each_type(*TYPES)
async def test_sends_arrive_in_receives(
    device: Device, qp_type: QpType, thread_model: ThreadModel, message_model: MessageModel
) -> None:
    async with ends(device, qp_type, thread_model, message_model) as pair:
        pair.source.buffer[:5] = b"hello"
        for immediate in (None, 0, 0xFFFFFFFF):
            receive = pair.receive(pair.target[16:32])
            assert not receive.done()
            send = pair.near.send(pair.source[:5], immediate=immediate, fence=True, solicited=True, **pair.addressing)
            await send
            received = await receive
            assert receive.done()
            assert receive.result() is received
            assert send.done()
            assert send.result() is None
            assert (received.byte_len, received.immediate, received.invalidated_rkey) == (5, immediate, None)
            assert bytes(received.data) == b"hello"
            assert received.qp_num == pair.far.qp_num
            # The sender of a connected queue pair is known in advance; only of datagrams is it reported per message.
            assert qp_type is not QpType.UD or received.src_qp == pair.near.qp_num
            assert (received.route is not None and len(received.route) == 40) == (qp_type is QpType.UD)
            assert bytes(pair.target.buffer[:16]) == bytes(16), "the GRH was written to the message's memory"
            pair.target.buffer[:32] = bytes(32)
        assert pair.is_idle()


@each_type(*CONNECTED)
async def test_remote_memory_is_written_and_read(
    device: Device, qp_type: QpType, thread_model: ThreadModel, message_model: MessageModel
) -> None:
    async with ends(device, qp_type, thread_model, message_model) as pair:
        write = pair.write(b"written")
        await write
        assert write.done()
        assert write.result() is None
        await pair.wait_arrival(b"written\0")
        receive = pair.receive()
        pair.source.buffer[:4] = b"imm!"
        write_imm = pair.near.write_with_immediate(pair.source[:4], pair.target.remote()[64:68], 77, **pair.addressing)
        await write_imm
        received = await receive
        assert (received.byte_len, received.immediate) == (4, 77)
        assert bytes(pair.target.buffer[64:69]) == b"imm!\0"
        if qp_type is not QpType.UC:
            read = pair.near.read(pair.source[100:107], pair.target.remote()[:7], **pair.addressing)
            await read
            assert bytes(pair.source.buffer[99:108]) == b"\0written\0"
        assert pair.is_idle()


@each_type(QpType.RC, QpType.XRC_SEND)
async def test_atomics_return_the_previous_value(
    device: Device, qp_type: QpType, thread_model: ThreadModel, message_model: MessageModel
) -> None:
    def number() -> int:
        return int.from_bytes(pair.target.buffer[8:16], "little")

    async with ends(device, qp_type, thread_model, message_model) as pair:
        remote = pair.target.remote()[8:16]
        assert await pair.near.fetch_and_add(remote, 5, **pair.addressing) == 0
        assert await pair.near.fetch_and_add(remote, 2**64 - 2, **pair.addressing) == 5
        assert number() == 3
        assert await pair.near.compare_and_swap(remote, 4, 9, **pair.addressing) == 3
        assert number() == 3
        swap = pair.near.compare_and_swap(remote, 3, 2**64 - 1, **pair.addressing)
        assert await swap == swap.result() == 3
        assert number() == 2**64 - 1
        adds = [pair.near.fetch_and_add(remote, 1, **pair.addressing) for _ in range(40)]
        assert [await add for add in adds] == [2**64 - 1, *range(39)], "more requests than slots execute in order"
        assert pair.is_idle()


@each_type(*CONNECTED)
async def test_windows_grant_access_until_they_are_invalidated(
    device: Device, qp_type: QpType, thread_model: ThreadModel, message_model: MessageModel
) -> None:
    async with ends(device, qp_type, thread_model, message_model) as pair, AsyncExitStack() as stack:
        for mw_type in MwType:
            window = await stack.enter_async_context(pair.domain.memory_window(mw_type))
            bind = pair.near.bind_window(window, pair.source[64:128], AccessFlags.REMOTE_WRITE)
            granted = await bind
            assert granted == bind.result()
            assert (granted.address, granted.length) == (pair.source.address + 64, 64)
            assert granted.rkey == window.rkey != pair.source.rkey
            if qp_type is not QpType.XRC_SEND:  # far posts the request
                await pair.far.write(pair.target[:4], granted[:4])
            uc = qp_type is QpType.UC and Capability.INVALIDATES_ON_UC not in capabilities(device.name)
            if mw_type is MwType.TYPE_2 and not uc:
                await pair.near.invalidate(granted.rkey)
                if qp_type is QpType.RC:
                    with pytest.raises(WorkCompletionError) as caught:
                        await pair.far.write(pair.target[:4], granted[:4])
                    assert caught.value.status is WcStatus.REM_ACCESS_ERR
        assert pair.is_idle()


@qp_types(*CONNECTED)
@needs(Capability.REPORTS_INVALIDATED_KEYS)
async def test_a_send_invalidates_a_window_of_the_peer(device: Device, qp_type: QpType) -> None:
    async with ends(device, qp_type) as pair, pair.remote_domain.memory_window(MwType.TYPE_2) as window:
        if qp_type is QpType.XRC_SEND:
            # The far end of XRC binds no windows: any key that it is asked to invalidate is unknown to it.
            with pytest.raises(WorkCompletionError):
                await pair.near.send_with_invalidate(None, 0x1234, **pair.addressing)
            return
        granted = await pair.far.bind_window(window, pair.target[:64], AccessFlags.REMOTE_WRITE)
        receive = pair.receive(pair.target[64:])
        pair.source.buffer[:3] = b"bye"
        await pair.near.send_with_invalidate(pair.source[:3], granted.rkey)
        received = await receive
        assert (received.byte_len, received.invalidated_rkey, received.immediate) == (3, granted.rkey, None)
        assert bytes(received.data) == b"bye"


def _rkey(pair: Ends) -> int:
    return pair.target.rkey


UNSUPPORTED: list[tuple[QpType, str, Callable[[Ends], object]]] = [
    (QpType.UC, "RDMA_READ", lambda pair: pair.near.read(pair.source[:8], pair.target.remote()[:8])),
    (QpType.UC, "ATOMIC_CMP_AND_SWP", lambda pair: pair.near.compare_and_swap(pair.target.remote()[:8], 0, 1)),
    (QpType.UC, "ATOMIC_FETCH_AND_ADD", lambda pair: pair.near.fetch_and_add(pair.target.remote()[:8], 1)),
    (QpType.UD, "RDMA_READ", lambda pair: pair.near.read(pair.source[:8], pair.target.remote()[:8])),
    (QpType.UD, "RDMA_WRITE", lambda pair: pair.near.write(pair.source[:8], pair.target.remote()[:8])),
    (
        QpType.UD,
        "RDMA_WRITE_WITH_IMM",
        lambda pair: pair.near.write_with_immediate(pair.source[:8], pair.target.remote()[:8], 1),
    ),
    (QpType.UD, "ATOMIC_CMP_AND_SWP", lambda pair: pair.near.compare_and_swap(pair.target.remote()[:8], 0, 1)),
    (QpType.UD, "ATOMIC_FETCH_AND_ADD", lambda pair: pair.near.fetch_and_add(pair.target.remote()[:8], 1)),
    (QpType.UD, "SEND_WITH_INV", lambda pair: pair.near.send_with_invalidate(pair.source[:8], _rkey(pair))),
    (QpType.UD, "LOCAL_INV", lambda pair: pair.near.invalidate(_rkey(pair))),
]


@pytest.mark.parametrize(
    ("qp_type", "opcode", "call"), UNSUPPORTED, ids=[f"{qp_type.name}-{opcode}" for qp_type, opcode, _ in UNSUPPORTED]
)
async def test_operations_unsupported_by_the_type_are_refused(
    device: Device, qp_type: QpType, opcode: str, call: Callable[[Ends], object]
) -> None:
    async with ends(device, qp_type) as pair:
        with pytest.raises(ValueError, match=f"is of type {qp_type.name}, which does not support {opcode}"):
            call(pair)
        assert pair.near.statistics().sends.posted == 0
        assert pair.is_idle()


async def test_windows_are_not_bound_for_datagrams(device: Device) -> None:
    async with ends(device, QpType.UD) as pair, pair.domain.memory_window(MwType.TYPE_1) as window:
        with pytest.raises(ValueError, match="is of type UD, which does not support BIND_MW"):
            _ = pair.near.bind_window(window, pair.source, AccessFlags.REMOTE_READ)
        assert pair.is_idle()


@needs(Capability.XRC_DOMAINS)
async def test_xrc_receives_only_through_shared_queues(device: Device) -> None:
    async with ends(device, QpType.XRC_SEND) as pair:
        with pytest.raises(ValueError, match="has no receive queue of its own"):
            _ = pair.near.receive(pair.source)
        with pytest.raises(ValueError, match="has no receive queue of its own"):
            _ = pair.far.receive(pair.source)
        with pytest.raises(ValueError, match="XRC_RECV"):
            _ = pair.far.write(pair.source[:8], pair.target.remote()[:8])
        for call in (
            lambda: pair.near.write(pair.source[:8], pair.target.remote()[:8]),
            lambda: pair.near.send(pair.source[:8]),
            lambda: pair.near.fetch_and_add(pair.target.remote()[:8], 1),
        ):
            with pytest.raises(ValueError, match=r"pass the number .* as `srq_number`"):
                call()
        with pytest.raises(TypeError, match="float"):
            _ = pair.near.send(None, srq_number=1.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="`srq_number` must fit in 32 bits"):
            _ = pair.near.send(None, srq_number=1 << 32)
        assert pair.near.statistics().sends.posted == 0
        assert pair.is_idle()
