"""Credits, frames, backoff and settings: code without input or output."""

import math
import random
import tracemalloc
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, strategies as st

from aioverbs import AccessFlags, Backoff, ConnectionSettings
from aioverbs._connection.credits import MAX_CREDITS, RESERVED_CREDITS
from aioverbs._connection.gather import Cursor, parts_of
from aioverbs._connection.reassembly import Assembly
from aioverbs._connection.wire import FIRST, HAS_IMMEDIATE, LAST, TOTAL, FrameKind, GrantNotice, header, parse_header
from aioverbs._core.data_path.data_path import Credits

# ---- Credits


@dataclass
class End:
    """One end, with the messages in flight to it: for each the credits returned, and whether it is a user's message."""

    credits: Credits
    depth: int
    in_flight: deque[tuple[int, bool]] = field(default_factory=deque)
    unread: int = 0

    def send(self, other: "End", message: bool) -> None:
        returned = self.credits.take()
        other.in_flight.append((returned, message))
        assert len(other.in_flight) <= other.depth, "no receive is posted for it"

    def update(self, other: "End") -> None:
        if self.credits.update_due:
            self.send(other, False)


@given(st.integers(3, 12), st.integers(3, 12), st.integers(0, 2**32))
def test_credits_never_overrun_receives_nor_deadlock(near_depth: int, peer_depth: int, seed: int) -> None:
    rng = random.Random(seed)
    near = End(Credits(peer_depth, near_depth), near_depth)
    far = End(Credits(near_depth, peer_depth), peer_depth)
    done = 0
    for _ in range(400):
        here, there = (near, far) if rng.random() < 0.5 else (far, near)
        what = rng.randrange(3)
        if what == 0 and here.credits.sendable:
            here.send(there, True)
        elif what == 1 and here.in_flight:
            returned, message = here.in_flight.popleft()
            here.credits.on_message()
            here.credits.add(returned)
            if message:
                here.unread += 1
            else:
                here.credits.on_consumed()
                here.update(there)
        elif what == 2 and here.unread:
            here.unread -= 1
            done += 1
            here.credits.on_consumed()
            here.update(there)
    # Once everybody reads, everybody can send.
    for _ in range(200):
        for here, there in ((near, far), (far, near)):
            while here.in_flight:
                returned, message = here.in_flight.popleft()
                here.credits.on_message()
                here.credits.add(returned)
                here.credits.on_consumed()
                here.update(there)
            while here.unread:
                here.unread -= 1
                here.credits.on_consumed()
            here.update(there)
        if not near.in_flight and not far.in_flight:
            break
    assert near.credits.sendable
    assert far.credits.sendable
    assert not near.in_flight
    assert not far.in_flight


def test_credits_are_reserved() -> None:
    subject = Credits(4, 4)
    while subject.sendable:
        subject.take()
    assert subject.available == RESERVED_CREDITS
    subject.revocations = 1
    subject.add(1)
    assert not subject.sendable
    subject.add(1)
    assert subject.sendable


def test_too_many_returned_credits_raise() -> None:
    subject = Credits(4, 4)
    with pytest.raises(ValueError, match="returned 1 credits"):
        subject.add(1)
    subject.take()
    subject.add(1)
    with pytest.raises(ValueError, match="only 0 were used"):
        subject.add(1)


def test_messages_without_credits_raise() -> None:
    """Only credits that this end has returned may be used again."""
    subject = Credits(4, 4)
    for _ in range(4):
        subject.on_message()
    with pytest.raises(ValueError, match="no credit"):
        subject.on_message()
    subject.on_consumed()
    subject.undo_take(subject.take())
    with pytest.raises(ValueError, match="no credit"):
        subject.on_message()
    assert subject.take() == 1
    subject.on_message()


@pytest.mark.parametrize("depths", [(2, 4), (4, 2), (MAX_CREDITS + 1, 4)])
def test_invalid_depths(depths: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="from 3"):
        Credits(*depths)


# ---- Fragments


@given(st.lists(st.binary(max_size=20), max_size=8), st.data())
def test_a_cursor_gives_the_bytes_of_all_parts_in_order(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    subject, at = Cursor(parts_of(parts)), 0
    while at < len(whole):
        length = data.draw(st.integers(1, len(whole) - at))
        assert b"".join(subject.take(length)) == whole[at : at + length]
        at += length
    assert subject.take(0) == []


def test_short_fragments_need_little_memory() -> None:
    """A peer may cut a message into many fragments and never end it: memory stays proportional to the bytes."""
    subject, count = Assembly(1 << 30), 20_000
    subject.add(TOTAL.pack(1 << 30), FIRST)
    tracemalloc.start()
    try:
        for _ in range(count):
            assert subject.add(b"xy", 0) is None
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 4 * count


def test_fragments_are_joined_in_the_memory_that_is_asked_for() -> None:
    subject = Assembly(1 << 20)
    assert subject.add(TOTAL.pack(700) + b"a" * 300, FIRST) is None
    assert subject.add(b"b" * 300, 0) is None
    message = subject.add(b"c" * 100, LAST)
    assert message is not None
    whole = b"a" * 300 + b"b" * 300 + b"c" * 100
    one, other = message.writable_data, message.writable_data
    assert message.data == one == whole
    assert (one.format, one.ndim, message.immediate) == ("B", 1, None)
    one[:] = bytes(700)
    assert other == whole


# ---- Frames


@given(
    st.sampled_from(FrameKind),
    st.sampled_from([0, FIRST, LAST, HAS_IMMEDIATE, FIRST | LAST, FIRST | LAST | HAS_IMMEDIATE]),
    st.integers(0, MAX_CREDITS),
    st.integers(0, 0xFFFF),
)
def test_header_round_trip(kind: FrameKind, flags: int, returned: int, number: int) -> None:
    made = header(kind, flags, returned, number)
    assert 0 <= made < 1 << 32
    assert parse_header(made) == (kind, flags, returned, number)


@given(st.integers(0, 2**32 - 1))
def test_any_header_is_parsed(immediate: int) -> None:
    kind, flags, returned, number = parse_header(immediate)
    assert kind << 29 | flags | returned << 16 | number == immediate


@given(st.integers(0, 2**63), st.integers(1, 2**63 - 1), st.integers(0, 2**32 - 1))
def test_grant_notice_round_trip(address: int, length: int, rkey: int) -> None:
    notice = GrantNotice(address, length, rkey, AccessFlags.REMOTE_READ)
    assert GrantNotice.parse(notice.pack()) == notice


@given(st.binary(max_size=40))
def test_arbitrary_notices_raise_only_value_errors(data: bytes) -> None:
    try:
        notice = GrantNotice.parse(data)
    except ValueError:
        return
    assert notice.pack() == data


@pytest.mark.parametrize(
    "notice",
    [
        GrantNotice(0, 0, 1, AccessFlags.REMOTE_READ),
        GrantNotice(2**64 - 8, 9, 1, AccessFlags.REMOTE_READ),
        GrantNotice(0, 8, 1, AccessFlags(0)),
        GrantNotice(0, 8, 1, AccessFlags.LOCAL_WRITE),
    ],
)
def test_invalid_notices(notice: GrantNotice) -> None:
    with pytest.raises(ValueError, match="invalid values"):
        GrantNotice.parse(notice.pack())


# ---- Waits


@given(
    st.floats(0.001, 10),
    st.floats(1, 100),
    st.floats(1, 4),
    st.floats(0, 1),
    st.integers(1, 30),
    st.randoms(use_true_random=False),
)
def test_backoff_waits(
    first_s: float, more: float, factor: float, jitter: float, attempts: int, rng: random.Random
) -> None:
    policy = Backoff(first_s, first_s * more, factor, jitter, attempts)
    waits = list(policy.waits(rng))
    assert len(waits) == attempts - 1
    for at, wait_s in enumerate(waits):
        longest_s = min(first_s * factor**at, first_s * more)
        assert longest_s * (1 - jitter) * 0.999 <= wait_s <= longest_s * 1.001


def test_backoff_without_limit_and_jitter() -> None:
    waits = Backoff(1, 10, 2, jitter=0).waits(random.Random(1))
    assert list(islice(waits, 6)) == [1, 2, 4, 8, 10, 10]


def test_backoff_waits_differ() -> None:
    policy = Backoff(1, 10)
    assert list(islice(policy.waits(random.Random(1)), 4)) != list(islice(policy.waits(random.Random(2)), 4))


@pytest.mark.parametrize(
    "wrong",
    [{"first_s": 0}, {"longest_s": 0.01}, {"factor": 0.5}, {"jitter": 1.5}, {"jitter": -1}, {"attempts": 0}],
)
def test_invalid_backoff(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="got"):
        Backoff(**wrong)  # type: ignore[arg-type]


# ---- Sizes


@pytest.mark.parametrize(
    "wrong",
    [
        {"buffer_size": 100},
        {"receive_depth": 3},
        {"receive_depth": 1024},
        {"send_buffers": 0},
        {"send_depth": 4},
        {"max_message": 0},
        {"max_grants": -1},
        {"keep_alive_s": 0},
        {"close_timeout_s": -1},
    ],
)
def test_invalid_settings(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        ConnectionSettings(**wrong)


@given(st.floats(0.1, 1e6))
def test_retries_end_within_half_of_keep_alive(keep_alive_s: float) -> None:
    found = ConnectionSettings(keep_alive_s=keep_alive_s).repetitions(software=False)
    assert found["retry_cnt"] == 6
    assert 1 <= found["timeout"] <= 14
    assert 4.096e-6 * 2 ** found["timeout"] * 7 * 4 <= keep_alive_s / 2
    assert found["timeout"] == 14 or 4.096e-6 * 2 ** (found["timeout"] + 1) * 7 * 4 > keep_alive_s / 2


@given(st.floats(0.1, 61_000))
def test_software_retries_last_for_keep_alive(keep_alive_s: float) -> None:
    found = ConnectionSettings(keep_alive_s=keep_alive_s).repetitions(software=True)
    each_s = 4.096e-6 * 2 ** found["timeout"]
    assert found["retry_cnt"] <= 6
    assert keep_alive_s <= each_s * (found["retry_cnt"] + 1) <= keep_alive_s + each_s <= keep_alive_s * 1.5


def test_retries_without_limit() -> None:
    for keep_alive_s in (1e9, math.inf):
        found = ConnectionSettings(keep_alive_s=keep_alive_s).repetitions(software=True)
        assert found == {"timeout": 31, "retry_cnt": 6}
    assert ConnectionSettings(keep_alive_s=None).repetitions(software=True)["timeout"] == 0, "which is for ever"
    assert ConnectionSettings(keep_alive_s=None).repetitions(software=False) == {"timeout": 14, "retry_cnt": 6}
