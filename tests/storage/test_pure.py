"""Property tests of the protocol's encoding and of byte ranges."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st
from storage_server import protocol
from storage_server.errors import StorageError, error_of
from storage_server.protocol import (
    MAX_DATA,
    MAX_MESSAGE,
    MAX_TEXT,
    Challenge,
    Checksum,
    Close,
    Copy,
    Create,
    Data,
    Delete,
    Done,
    Failed,
    Flush,
    Hello,
    Listing,
    ListVolumes,
    Message,
    Mode,
    Open,
    Opened,
    ProtocolError,
    Read,
    Reopen,
    Resize,
    VolumeInfo,
    Write,
    pack,
    parse,
    proof_of,
)
from storage_server.ranges import MAX_RANGES, Ranges

NUMBERS = st.integers(0, 2**32 - 1)
LARGE = st.integers(0, 2**64 - 1)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
DATA = st.binary(max_size=1000) | st.sampled_from([255, 256, 65535, 65536, MAX_DATA]).map(bytes)
MODES = st.sampled_from([Mode.READ, Mode.WRITE]).map(int)


@st.composite
def separate(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    bounds = sorted(draw(st.sets(LARGE, max_size=40)))
    return tuple(zip(bounds[::2], bounds[1::2], strict=False))


MESSAGES: dict[type[Any], st.SearchStrategy[Any]] = {
    Challenge: st.builds(Challenge, st.integers(0, 2**16 - 1), st.binary(min_size=16, max_size=16)),
    Hello: st.builds(Hello, st.integers(0, 2**16 - 1), st.binary(min_size=32, max_size=32), TEXTS),
    ListVolumes: st.builds(ListVolumes),
    Create: st.builds(Create, LARGE, TEXTS),
    Copy: st.builds(Copy, st.booleans(), TEXTS, TEXTS),
    Resize: st.builds(Resize, LARGE, TEXTS),
    Delete: st.builds(Delete, TEXTS),
    Open: st.builds(Open, MODES, TEXTS),
    Reopen: st.builds(Reopen, NUMBERS),
    Close: st.builds(Close, NUMBERS),
    Read: st.builds(Read, NUMBERS, LARGE, NUMBERS, st.booleans()),
    Write: st.builds(Write, NUMBERS, LARGE, st.booleans(), NUMBERS, DATA),
    Checksum: st.builds(Checksum, NUMBERS, LARGE, NUMBERS),
    Flush: st.builds(Flush, NUMBERS, separate()),
    Done: st.builds(Done),
    Failed: st.builds(Failed, st.integers(1, 8), TEXTS),
    Listing: st.builds(Listing, st.lists(st.builds(VolumeInfo, TEXTS, LARGE, st.booleans())).map(tuple)),
    Opened: st.builds(Opened, NUMBERS, LARGE, MODES, st.booleans(), NUMBERS),
    Data: st.builds(Data, NUMBERS, DATA),
}
ANY = st.one_of(*MESSAGES.values())


def parsed(data: bytes) -> tuple[int, Message] | None:
    try:
        return parse(data)
    except ProtocolError:
        return None


def test_all_messages_are_tried() -> None:
    assert set(MESSAGES) == set(protocol.Message.__args__)


@given(NUMBERS, ANY)
def test_packed_messages_parse_to_the_same(number: int, message: Message) -> None:
    data = pack(number, message)
    found = parse(data)
    assert found == (number, message)
    assert type(found[1]) is type(message)
    assert len(data) <= MAX_MESSAGE


@given(st.binary(max_size=200))
def test_parsed_bytes_pack_to_the_same(data: bytes) -> None:
    found = parsed(data)
    assert found is None or pack(*found) == data


@given(NUMBERS, ANY, st.data())
def test_modified_messages_are_rejected_or_differ(number: int, message: Message, data: st.DataObject) -> None:
    whole = bytearray(pack(number, message))
    match data.draw(st.sampled_from(["cut", "longer", "flipped"])):
        case "cut":
            del whole[data.draw(st.integers(0, len(whole) - 1)) :]
        case "longer":
            whole += data.draw(st.binary(min_size=1, max_size=20))
        case "flipped":
            whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    found = parsed(bytes(whole))
    assert found is None or (found != (number, message) or type(found[1]) is not type(message))
    assert found is None or pack(*found) == whole


def encode(*values: object) -> bytes:
    """Return the encoding of arbitrary values as a message."""
    return bytes(4) + msgspec.msgpack.encode(values)


INVALID = [
    b"",
    b"\0" * 5,
    b"\xff" * 5,
    b"\1\0\0",
    encode(15, 3, "a"),  # a mode that volumes cannot be opened in
    encode(15, 1, "a", "more"),
    encode(15, 1),
    encode(15, True, "a"),
    encode(99),
    encode(12, 1, "a", "b"),
    encode(31, 9, "a"),
    encode(21, 1, [[6, 5]]),
    encode(21, 1, [[5, 5]]),
    encode(21, 1, [[5, 6], [6, 7]]),
    encode(21, 1, [[5, 6, 7]]),
    encode(21, 1, [[2 * each, 2 * each + 1] for each in range(MAX_RANGES + 1)]),
    encode(14, "a" * (MAX_TEXT + 1)),
    encode(34, 0, bytes(MAX_DATA + 1)),
    encode(16, 2**32),
    encode(11, -1, "a"),
    encode(1, 1, bytes(15)),
    pack(1, Delete("ab"))[:-1] + b"\xff",
    pack(1, Reopen(1))[:-1] + b"\xcc\x01",  # a longer encoding of the same message
    pack(1, Reopen(1)) + b"\x91" * 10_000 + b"\x00",
    bytes(4) + b"\x92\x1e" + b"\x91" * 10_000 + b"\x00",  # nested more deeply than the decoder supports
]


def test_invalid_messages_are_rejected() -> None:
    assert [data for data in INVALID if parsed(data) is not None] == []


@pytest.mark.parametrize(
    "message",
    [Data(0, bytes(MAX_DATA + 1)), Delete("x" * (MAX_TEXT + 1)), Create(-1, "x"), Create(2**64, "x"), Reopen(2**32)],
    ids=lambda message: type(message).__name__,
)
def test_messages_beyond_the_limits_are_not_packed(message: Message) -> None:
    with pytest.raises(ValueError, match=f"a {type(message).__name__} cannot be sent"):
        pack(1, message)


def test_proofs_depend_on_key_and_nonce() -> None:
    proofs = {proof_of(key, nonce) for key in (b"a", b"b") for nonce in (b"1", b"2")}
    assert len(proofs) == 4
    assert proof_of(b"a", b"1") in proofs


def test_each_code_has_its_error() -> None:
    for code in range(1, 9):
        error = error_of(code, "why")
        assert isinstance(error, StorageError)
        assert (error.code, str(error)) == (code, "why")


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 30))), st.integers(1, 12))
def test_ranges_cover_all_added_bytes(added: list[tuple[int, int]], most: int) -> None:
    """Ranges are sorted and apart. They contain no other bytes as long as there are few ranges."""
    ranges = Ranges(most)
    wanted: set[int] = set()
    ever_many = False
    for start, length in added:
        ranges.add(start, start + length)
        wanted |= set(range(start, start + length))
        holes = {each for each in wanted if each + 1 not in wanted}
        ever_many |= len(holes) > most
        assert len(ranges) <= most
    taken = ranges.take()
    covered = {each for start, end in taken for each in range(start, end)}
    assert covered >= wanted
    assert ever_many or covered == wanted
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(taken))
    assert len(ranges) == 0
    if taken:
        assert parse(pack(1, Flush(1, taken))) == (1, Flush(1, taken))
