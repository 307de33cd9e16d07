"""Each opcode moves the bytes that it names, in order, and completes with what it did."""

import os
import threading
from itertools import pairwise
from typing import Any

import pytest

from aioverbs import SendFlags, SendOpcode, WcFlags, WcOpcode, WcStatus
from aioverbs._core.software import software
from tests.core.pairs import End, connect, connect_to, make_domain, make_end, make_pair, succeed, wait_for

SIGNALED = SendFlags.SIGNALED
IMMEDIATE = 0x01020304


@pytest.fixture(params=["basic", "extended"])
def pair(request: pytest.FixtureRequest, context: software.Context, kind: str) -> tuple[End, End]:
    """In each mode, with and without a thread domain, polled in both ways."""
    near, far = make_pair(context, kind, extended=request.param == "extended")
    near.memory[:] = os.urandom(len(near.memory))
    return near, far


def test_send(pair: tuple[End, End]) -> None:
    near, far = pair
    far.qp.post_recv([far.sge(100, 200)], wr_id=7)
    near.qp.post_send(SendOpcode.SEND, [near.sge(0, 150)], wr_id=8, flags=SIGNALED)
    sent, received = succeed(near.cq), succeed(far.cq)
    assert (sent.wr_id, sent.opcode, sent.qp_num) == (8, WcOpcode.SEND, near.qp.qp_num)
    assert (received.wr_id, received.opcode, received.qp_num) == (7, WcOpcode.RECV, far.qp.qp_num)
    assert (received.byte_len, received.src_qp, received.wc_flags) == (150, near.qp.qp_num, 0)
    assert far.memory == bytes(100) + near.memory[:150] + bytes(len(far.memory) - 250)


def test_send_with_immediate(pair: tuple[End, End]) -> None:
    near, far = pair
    far.qp.post_recv()
    near.qp.post_send(SendOpcode.SEND_WITH_IMM, imm_data=IMMEDIATE, flags=SIGNALED)
    received = succeed(far.cq)
    assert (received.opcode, received.byte_len) == (WcOpcode.RECV, 0)
    assert (received.wc_flags, received.imm_data) == (WcFlags.WITH_IMM, IMMEDIATE)
    assert succeed(near.cq).opcode == WcOpcode.SEND


def test_write(pair: tuple[End, End]) -> None:
    near, far = pair
    near.qp.post_send(
        SendOpcode.RDMA_WRITE,
        [near.sge(0, 1000), near.sge(3000, 24)],
        flags=SIGNALED,
        remote_addr=far.region.address + 7,
        rkey=far.region.rkey,
    )
    assert succeed(near.cq).opcode == WcOpcode.RDMA_WRITE
    assert far.memory[:1031] == bytes(7) + near.memory[:1000] + near.memory[3000:3024]
    assert far.cq.poll() == []


def test_write_with_immediate(pair: tuple[End, End]) -> None:
    near, far = pair
    far.qp.post_recv(wr_id=5)
    near.qp.post_send(
        SendOpcode.RDMA_WRITE_WITH_IMM,
        [near.sge(0, 64)],
        flags=SIGNALED,
        imm_data=IMMEDIATE,
        remote_addr=far.region.address,
        rkey=far.region.rkey,
    )
    received = succeed(far.cq)
    assert (received.wr_id, received.opcode) == (5, WcOpcode.RECV_RDMA_WITH_IMM)
    assert (received.imm_data, received.byte_len) == (IMMEDIATE, 64)
    assert succeed(near.cq).opcode == WcOpcode.RDMA_WRITE
    assert far.memory[:64] == near.memory[:64]


def test_read(pair: tuple[End, End]) -> None:
    near, far = pair
    far.qp.post_send(
        SendOpcode.RDMA_READ,
        [far.sge(0, 10), far.sge(1000, 2000)],
        flags=SIGNALED,
        remote_addr=near.region.address + 1,
        rkey=near.region.rkey,
    )
    completion = succeed(far.cq)
    assert (completion.opcode, completion.byte_len) == (WcOpcode.RDMA_READ, 2010)
    assert far.memory[:10] + far.memory[1000:3000] == near.memory[1:2011]


def atomic(near: End, far: End, opcode: SendOpcode, compare_add: int, swap: int = 0) -> int:
    """Carry an atomic out at the far memory's start; what it found there."""
    near.qp.post_send(
        opcode,
        [near.sge(8, 8)],
        flags=SIGNALED,
        remote_addr=far.region.address,
        rkey=far.region.rkey,
        compare_add=compare_add,
        swap=swap,
    )
    completion = succeed(near.cq)
    assert completion.byte_len == 8
    assert completion.opcode == (WcOpcode.COMP_SWAP if opcode is SendOpcode.ATOMIC_CMP_AND_SWP else WcOpcode.FETCH_ADD)
    return int.from_bytes(near.memory[8:16], "little")


def test_atomics(pair: tuple[End, End]) -> None:
    near, far = pair
    far.memory[:8] = (41).to_bytes(8, "little")
    assert atomic(near, far, SendOpcode.ATOMIC_FETCH_AND_ADD, 1) == 41
    assert atomic(near, far, SendOpcode.ATOMIC_CMP_AND_SWP, 41, 5) == 42  # not what is there: nothing is swapped
    assert atomic(near, far, SendOpcode.ATOMIC_CMP_AND_SWP, 42, 5) == 42
    assert atomic(near, far, SendOpcode.ATOMIC_FETCH_AND_ADD, (1 << 64) - 6) == 5
    assert far.memory[:16] == b"\xff" * 8 + bytes(8)


def test_inline_data_is_copied_in_the_call(pair: tuple[End, End]) -> None:
    near, far = pair
    for offset in range(4):
        near.memory[:16] = bytes([offset] * 16)
        # Registered or not makes no difference to it: the key is not looked at.
        near.qp.post_send(
            SendOpcode.RDMA_WRITE,
            [(near.region.address, 10, 0), (near.region.address + 10, 6, 0)],
            flags=SIGNALED | SendFlags.INLINE,
            remote_addr=far.region.address + 16 * offset,
            rkey=far.region.rkey,
        )
    near.memory[:16] = bytes(16)
    wait_for(near.cq, 4)
    assert far.memory[:64] == bytes([0] * 16 + [1] * 16 + [2] * 16 + [3] * 16)


def test_a_message_is_scattered(pair: tuple[End, End]) -> None:
    near, far = pair
    far.qp.post_recv([far.sge(0, 5), far.sge(100, 0), far.sge(200, 3), far.sge(300, 100)])
    near.qp.post_send(SendOpcode.SEND, [near.sge(0, 6), near.sge(50, 4)])
    assert succeed(far.cq).byte_len == 10
    message = near.memory[:6] + near.memory[50:54]
    assert far.memory[:5] + far.memory[200:203] + far.memory[300:303] == message[:8] + message[8:] + b"\0"


def test_nothing_is_a_message_too(pair: tuple[End, End]) -> None:
    near, far = pair
    for opcode in (SendOpcode.RDMA_WRITE, SendOpcode.RDMA_READ):
        # Without a byte to move, neither key is looked at.
        near.qp.post_send(opcode, [(0, 0, 0)], flags=SIGNALED, remote_addr=1, rkey=1)
        succeed(near.cq)
    assert not any(far.memory)


def test_order(pair: tuple[End, End]) -> None:
    """Requests of one queue pair take effect one after the other, and complete so."""
    near, far = pair
    for number in range(100):
        far.qp.post_recv([far.sge(0, 4)], wr_id=number)
        near.qp.post_send(SendOpcode.SEND, [near.sge(4 * number, 4)], wr_id=number, flags=SIGNALED if number % 2 else 0)
    assert [completion.wr_id for completion in wait_for(near.cq, 50)] == list(range(1, 100, 2))
    assert [completion.wr_id for completion in wait_for(far.cq, 100)] == list(range(100))
    assert far.memory[:4] == near.memory[396:400]


def test_fence_and_reads_between_writes(pair: tuple[End, End]) -> None:
    near, far = pair
    remote: Any = {"remote_addr": far.region.address, "rkey": far.region.rkey}
    written = bytes(near.memory[:24])
    for offset in (0, 8, 16):
        near.qp.post_send(SendOpcode.RDMA_WRITE, [near.sge(offset, 8)], **remote)
        near.qp.post_send(
            SendOpcode.RDMA_READ, [near.sge(1000 + offset, 8)], flags=SIGNALED | SendFlags.FENCE, **remote
        )
    assert all(completion.status is WcStatus.SUCCESS for completion in wait_for(near.cq, 3))
    assert near.memory[1000:1024] == written


def test_all_signalled(context: software.Context, kind: str) -> None:
    domain = make_domain(context, kind)
    near, far = make_end(domain, sq_sig_all=True), make_end(domain)
    connect(near.qp, far.qp)
    assert near.qp.query().sq_sig_all
    assert not far.qp.query().sq_sig_all
    near.qp.post_send(SendOpcode.RDMA_WRITE, wr_id=3)
    assert succeed(near.cq).wr_id == 3


def test_unsignalled_tells_nothing(pair: tuple[End, End]) -> None:
    near, far = pair
    near.qp.post_send(SendOpcode.RDMA_WRITE, wr_id=1)
    far.qp.post_recv()
    near.qp.post_send(SendOpcode.SEND, wr_id=2)
    succeed(far.cq)
    assert near.cq.poll() == far.cq.poll() == []


def test_both_ways_and_large(context: software.Context, kind: str) -> None:
    size = 3 << 20
    ends = make_pair(context, kind, size=size)
    sent = [os.urandom(size // 2) for _ in ends]
    for end, data in zip(ends, sent, strict=True):
        end.memory[: size // 2] = data
        end.qp.post_recv([end.sge(size // 2, size // 2)])
    for end in ends:
        end.qp.post_send(SendOpcode.SEND, [end.sge(0, size // 2)])
    for end, data in zip(ends, reversed(sent), strict=True):
        assert succeed(end.cq).byte_len == size // 2
        assert end.memory[size // 2 :] == data


def test_a_queue_pair_connected_to_itself(context: software.Context, kind: str) -> None:
    end = make_end(make_domain(context, kind))
    connect_to(end.qp, end.qp)
    end.memory[:5] = b"hello"
    end.qp.post_recv([end.sge(64, 64)], wr_id=1)
    end.qp.post_send(SendOpcode.SEND, [end.sge(0, 5)], wr_id=2, flags=SIGNALED)
    assert sorted(completion.wr_id for completion in wait_for(end.cq, 2)) == [1, 2]
    assert end.memory[64:69] == b"hello"


def test_atomics_of_many_threads_add_up(context: software.Context) -> None:
    """They are atomic with each other, over queue pairs and threads."""
    domain = make_domain(context, "plain")
    target = make_end(domain)
    pairs = []
    for _ in range(3):
        near, far = make_end(domain), make_end(domain)
        connect(near.qp, far.qp)
        pairs.append((near, far))

    def add(near: End) -> None:
        found = []
        for _ in range(100):
            near.qp.post_send(
                SendOpcode.ATOMIC_FETCH_AND_ADD,
                [near.sge(0, 8)],
                flags=SIGNALED,
                remote_addr=target.region.address,
                rkey=target.region.rkey,
                compare_add=1,
            )
            succeed(near.cq)
            found.append(int.from_bytes(near.memory[:8], "little"))
        assert all(earlier < later for earlier, later in pairwise(found))
        near.memory[8] = 1

    threads = [threading.Thread(target=add, args=[near]) for near, _ in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(near.memory[8] for near, _ in pairs)
    assert int.from_bytes(target.memory[:8], "little") == 300
