"""PURE: how the frames of a Dask message are divided into messages of a connection.

A Dask message is a list of frames. Consecutive frames form a run, and each run arrives in memory of its own. The first
message is the head. A long run is a message of its own, but for the first run, which is always in the head. Short runs
are in the head if its run is short and, when that is full, in further messages, so that the receiver never has more
than `_MAX_TOGETHER` bytes twice:

    head       number of frames n, number of runs m, number of padding bytes p, 32 bits each
               size of each frame in bytes, n times 64 bits
               number of frames of each run, m times 32 bits
               p bytes, so that the first object begins at a multiple of `ALIGNMENT`; none if there is no object
               the first run, then short ones if it is short
    message    a run of at least `LONG_RUN` bytes, or short ones
    ...
"""

import struct
from collections.abc import Sequence
from itertools import islice

__all__ = ["ALIGNMENT", "LONG_RUN", "Buffers", "encode", "parse"]

LONG_RUN = 128 * 1024
"""Smallest size, in bytes, of a run that shares a message with no other one: the receiver reads it in one copy."""

ALIGNMENT = 64
"""Divisor, in bytes, of the place of the first object in the head: that of arrays in CPU caches."""

_MAX_TOGETHER = 1 << 20  # bytes of the runs in a message of several
_MAX_LEADING = 32 * 1024  # bytes of frames in one run with an object that follows them
_MAX_JOINED = 16 * 1024  # bytes of a message that are joined: several buffers cost more than that copy
_NUMBERS = struct.Struct("<III")
_SINGLE = struct.Struct("<IIIQI")  # numbers of one frame

Buffers = list[bytes | bytearray | memoryview]
"""Frames of a Dask message; or the parts of a message of a connection, which are sent one after the other."""


def encode(frames: Buffers) -> tuple[int, list[Buffers]]:
    """Divide the frames of a Dask message into messages of a connection.

    :param frames: at least one frame.
    :returns: the number of bytes of all messages, and the messages, each a list of buffers to send one after the other.
        A short message is one buffer.
    """
    if len(frames) == 1 and isinstance(frames[0], bytes):  # the usual message without an object
        total = _SINGLE.size + len(frames[0])
        messages: list[Buffers] = [[_SINGLE.pack(1, 1, 0, len(frames[0]), 1), frames[0]]]
    else:
        sizes = [len(frame) if isinstance(frame, bytes) else memoryview(frame).nbytes for frame in frames]
        runs, leading = _divide(frames, sizes)
        every_size = iter(sizes)
        totals = [sum(islice(every_size, len(run))) for run in runs]
        padding = -(_start(len(sizes), len(runs)) + leading) % ALIGNMENT if leading < totals[0] else 0
        numbers = struct.pack(
            f"<III{len(sizes)}Q{len(runs)}I{padding}x", len(sizes), len(runs), padding, *sizes, *map(len, runs)
        )
        total = len(numbers) + sum(sizes)
        messages = [[frame for number in message for frame in runs[number]] for message in _share(totals)]
        messages[0].insert(0, numbers)
    if total <= _MAX_JOINED:
        messages = [[b"".join(message)] for message in messages]
    return total, messages


def _start(n_frames: int, n_runs: int) -> int:
    """Return the size of the numbers in a head, in bytes."""
    return _NUMBERS.size + 8 * n_frames + 4 * n_runs


def _share(totals: Sequence[int]) -> list[list[int]]:
    """Return the numbers of the runs in each message. The head is the first message, and contains the first run.

    :param totals: number of bytes of each run.
    """
    shared = [0]  # the message that short runs are added to
    messages = [shared]
    filled = totals[0]
    for number, total in enumerate(totals[1:], 1):
        if total >= LONG_RUN:
            messages.append([number])
        elif filled + total <= _MAX_TOGETHER and not (shared == [0] and filled >= LONG_RUN):
            shared.append(number)
            filled += total
        else:
            shared = [number]
            messages.append(shared)
            filled = total
    return messages


def _divide(frames: Buffers, sizes: Sequence[int]) -> tuple[list[Buffers], int]:
    """Divide frames into runs.

    The memory of a run stays allocated as long as the receiver uses any part of it. A frame of `bytes` is only read
    while the message is decoded, but every other frame is the memory of an object that may live long. So each object
    has a run, which all slices of the object share. The first object shares the first run with the frames before it, if
    these are at most 2 KiB, or 5 % of it and at most 32 KiB.

    :param frames: at least one frame.
    :param sizes: size of each frame in bytes.
    :returns: the runs, each a list of at least one frame, and the number of bytes in the first run before its object.
    """
    run: Buffers = []
    runs = [run]
    current: object = None  # the object whose memory is in `run`; None if there is none yet
    leading = 0  # bytes in the first run before the first object
    for frame, size in zip(frames, sizes, strict=True):
        memory = frame.obj if isinstance(frame, memoryview) else frame
        if isinstance(memory, bytes):
            if current is not None:
                run = []
                runs.append(run)
                current = None
            elif len(runs) == 1:
                leading += size
        elif memory is not current:
            is_first = len(runs) == 1 and current is None
            if run and not (is_first and leading <= max(2048, min(size // 20, _MAX_LEADING))):
                run = []
                runs.append(run)
            current = memory
        run.append(frame)
    return runs, leading


def parse(head: memoryview) -> tuple[int, list[list[int]], list[list[int]]]:
    """Parse the beginning of a head that a peer sent.

    :param head: the message, format ``"B"``.
    :returns: the offset of the first run, for each run the sizes of its frames in bytes, and for each message the
        numbers of its runs.
    :raises ValueError: the message is no head, or contains more or fewer bytes than it says.
    """
    if len(head) >= _SINGLE.size:
        n_frames, n_runs, padding, size, count = _SINGLE.unpack_from(head)
        if n_frames == n_runs == count == 1 and len(head) == _SINGLE.size + padding + size:
            return _SINGLE.size + padding, [[size]], [[0]]
    if len(head) < _NUMBERS.size:
        raise ValueError(f"the head of a message has {len(head)} bytes, at least {_NUMBERS.size} are needed")
    n_frames, n_runs, padding = _NUMBERS.unpack_from(head)
    start = _start(n_frames, n_runs) + padding
    if not 1 <= n_runs <= n_frames or len(head) < start:
        raise ValueError(f"the head of a message has {len(head):,} bytes for {n_frames:,} frames in {n_runs:,} runs")
    numbers = struct.unpack_from(f"<{n_frames}Q{n_runs}I", head, _NUMBERS.size)
    sizes, counts = numbers[:n_frames], numbers[n_frames:]
    if sum(counts) != n_frames or 0 in counts:
        raise ValueError(f"the head of a message has {n_frames:,} frames, but its runs have {sum(counts):,}")
    runs = []
    at = 0
    for count in counts:
        runs.append(list(sizes[at : at + count]))
        at += count
    totals = [sum(run) for run in runs]
    messages = _share(totals)
    expected = start + sum(totals[number] for number in messages[0])
    if len(head) != expected:
        raise ValueError(f"the head of a message has {len(head):,} bytes instead of {expected:,}")
    return start, runs, messages
