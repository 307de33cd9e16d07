"""Frames of Dask messages in messages of a connection, without a connection."""

import struct

import pytest
from hypothesis import given, strategies as st

from aioverbs.distributed.framing import ALIGNMENT, LONG_RUN, encode, parse

Frames = list[bytes | bytearray | memoryview]


def runs_of(frames: Frames) -> list[list[int]]:
    """Return the sizes of the frames in each run."""
    _, messages = encode(frames)
    return parse(memoryview(b"".join(messages[0])))[1]


def decoded(messages: list[Frames]) -> list[bytes]:
    """Return the frames of messages."""
    joined = [b"".join(message) for message in messages]
    start, runs, numbers = parse(memoryview(joined[0]))
    frames: dict[int, list[bytes]] = {}
    for message, at, inside in zip(joined, [start] + [0] * len(numbers), numbers, strict=False):
        for number in inside:
            frames[number] = []
            for size in runs[number]:
                frames[number].append(message[at : at + size])
                at += size
        assert at == len(message)
    assert len(joined) == len(numbers)
    return [frame for number in range(len(runs)) for frame in frames[number]]


sizes = st.one_of(st.integers(0, 3000), st.sampled_from([LONG_RUN - 1, LONG_RUN, 600_000]))


@given(st.lists(st.tuples(st.booleans(), sizes), min_size=1, max_size=20))
def test_frames_arrive_as_they_were_sent(drawn: list[tuple[bool, int]]) -> None:
    frames: Frames = [
        bytes([number]) * size if is_bytes else memoryview(bytearray([number]) * size)
        for number, (is_bytes, size) in enumerate(drawn)
    ]
    total, messages = encode(frames)
    assert decoded(messages) == [bytes(each) for each in frames]
    assert total == sum(len(buffer) for message in messages for buffer in message)


def test_objects_do_not_share_a_run() -> None:
    frames: Frames = [b"h" * 10, memoryview(bytearray(8)), memoryview(bytearray(8)), b"h" * 10, bytearray(8)]
    assert runs_of(frames) == [[10, 8], [8], [10], [8]]


def test_slices_of_an_object_share_a_run() -> None:
    array = memoryview(bytearray(300_000))
    assert runs_of([b"h" * 10, array[:200_000], array[200_000:]]) == [[10, 200_000, 100_000]]
    other = memoryview(bytearray(2_000_000))
    assert runs_of([b"h" * 10, other[:1_000_000], other[1_000_000:]]) == [[10, *[1_000_000] * 2]]
    assert runs_of([b"h" * 10, bytearray(1), other[:1_000_000], other[1_000_000:]]) == [[10, 1], [1_000_000] * 2]


def test_no_message_of_short_runs_is_long() -> None:
    short: Frames = [bytearray(100_000) for _ in range(30)]
    _, messages = encode([b"h" * 10, *short[:15], bytearray(LONG_RUN), *short[15:]])
    lengths = [sum(map(len, message)) for message in messages]
    assert lengths[0] - len(messages[0][0]) == 10 + 10 * 100_000
    assert lengths[1:] == [10 * 100_000, LONG_RUN, 10 * 100_000]
    _, messages = encode([b"h" * 2_000_000, *short[:1]])
    assert len(messages) == 2


@pytest.mark.parametrize(
    ("leading", "size", "shared"),
    [
        (2048, 1, True),
        (2049, 1, False),
        (10_000, 200_000, True),
        (10_001, 200_000, False),
        (32_768, 600_000, False),
        (10, 600_000, True),
    ],
)
def test_the_first_object_shares_the_run_of_a_small_header(leading: int, size: int, shared: bool) -> None:
    assert runs_of([b"h" * leading, bytearray(size)]) == ([[leading, size]] if shared else [[leading], [size]])


@pytest.mark.parametrize("size", [1, 1000, 5_000_000])
@pytest.mark.parametrize("leading", [[], [3], [100, 57]])
def test_the_first_object_is_aligned_in_the_head(leading: list[int], size: int) -> None:
    _, messages = encode([*(bytes(each) for each in leading), bytearray(b"\xff") * size])
    assert len(messages) == 1
    assert b"".join(messages[0]).index(b"\xff" * size) % ALIGNMENT == 0


@pytest.mark.parametrize("frames", [[b"h" * 100], [b"h" * 100, b"x" * 200, bytearray(10_000)], [bytearray(1000)]])
def test_a_short_message_is_one_buffer(frames: Frames) -> None:
    _, messages = encode(frames)
    assert [len(message) for message in messages] == [1]
    assert decoded(messages) == [bytes(each) for each in frames]


def test_a_message_without_an_object_has_no_padding() -> None:
    assert encode([b"h" * 100])[0] == 12 + 8 + 4 + 100
    assert encode([b"h" * 100, b"x" * 200_000])[0] == 12 + 2 * 8 + 4 + 200_100


def test_a_long_first_run_shares_its_message_with_no_other_one() -> None:
    _, messages = encode([b"h" * 10, bytearray(LONG_RUN), bytearray(100), bytearray(100)])
    assert [sum(map(len, message)) for message in messages][1:] == [200]


def head(
    n_frames: int, n_runs: int, numbers: list[int], counts: list[int], rest: bytes = b"", padding: int = 0
) -> bytes:
    return struct.pack(f"<III{len(numbers)}Q{len(counts)}I", n_frames, n_runs, padding, *numbers, *counts) + rest


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x00" * 11,
        head(0, 0, [], []),
        head(2**32 - 1, 2**32 - 1, [], []),
        head(1, 0, [1], [], b"x"),
        head(1, 2, [1], [1, 0], b"x"),
        head(2, 2, [1, 1], [2, 0], b"xx"),
        head(2, 1, [1, 1], [1], b"xx"),
        head(1, 1, [2], [1], b"x"),
        head(1, 1, [2**64 - 1], [1], b"x"),
        head(1, 1, [0], [1], b"x"),
        head(1, 1, [1], [1], b"x", padding=1),
        head(1, 1, [1], [1], b"x", padding=2**32 - 1),
    ],
)
def test_a_malformed_head_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError, match="the head of a message has"):
        parse(memoryview(message))


@given(st.binary(max_size=64))
def test_any_head_is_parsed_or_refused(message: bytes) -> None:
    try:
        at, runs, messages = parse(memoryview(message))
    except ValueError:
        return
    assert at + sum(sum(runs[number]) for number in messages[0]) == len(message)
    assert sorted(number for numbers in messages for number in numbers) == list(range(len(runs)))
    assert all(runs)
