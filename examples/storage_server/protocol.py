"""PURE: what client and server say to each other, in bytes.

A message is its kind, the number of the request that it is or answers, the fields of its kind, and what is of any
length: a text, data, ranges, or a list of volumes. Each message has one form only, and whatever is not exactly that is
a `ProtocolError`: what is parsed packs to the same bytes again.
"""

import hmac
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from storage_server.errors import Code
from storage_server.messages import (
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
    Read,
    Reopen,
    Resize,
    VolumeInfo,
    Write,
)
from storage_server.ranges import RANGES_MOST

__all__ = ["DATA_MOST", "MESSAGE_MOST", "TEXT_MOST", "VERSION", "ProtocolError", "pack", "parse", "proof_of"]

VERSION = 1
DATA_MOST = 1 << 20  # bytes that a message carries of a volume
TEXT_MOST = 512
MESSAGE_MOST = DATA_MOST + 64
_HEAD = struct.Struct("<BI")
_COUNT = struct.Struct("<H")
_PAIR = struct.Struct("<QQ")
_INFO = struct.Struct("<QB")


class ProtocolError(Exception):
    """The other end said something that has no meaning."""


def proof_of(key: bytes, nonce: bytes) -> bytes:
    """What only somebody who knows the key can say to a nonce."""
    return hmac.digest(key, b"aioverbs storage " + bytes([VERSION]) + nonce, "sha256")


# ---- What is of any length


def _pack_text(text: str) -> bytes:
    data = text.encode()
    if len(data) > TEXT_MOST:
        raise ValueError(f"a text of {len(data)} bytes is too long: {TEXT_MOST} at most")
    return data


def _parse_text(data: memoryview) -> str:
    if len(data) > TEXT_MOST:
        raise ProtocolError(f"a text has {len(data)} bytes, of {TEXT_MOST} at most")
    return str(data, "utf-8")


def _pack_texts(texts: tuple[str, ...]) -> bytes:
    parts = [_pack_text(text) for text in texts]
    return b"".join(_COUNT.pack(len(part)) + part for part in parts)


def _parse_pair(data: memoryview) -> tuple[str, ...]:
    texts = []
    for _ in range(2):
        (length,) = _COUNT.unpack_from(data)
        texts.append(_parse_text(_exactly(data[_COUNT.size :], length)))
        data = data[_COUNT.size + length :]
    _end(data)
    return tuple(texts)


def _exactly(data: memoryview, length: int) -> memoryview:
    if len(data) < length:
        raise ProtocolError(f"{length} bytes are announced, and {len(data)} there")
    return data[:length]


def _end(data: memoryview) -> None:
    if len(data):
        raise ProtocolError(f"{len(data)} bytes too many")


def _pack_data(data: bytes) -> bytes:
    if len(data) > DATA_MOST:
        raise ValueError(f"a message carries {DATA_MOST:,} bytes at most, not {len(data):,}")
    return data


def _parse_data(data: memoryview) -> bytes:
    if len(data) > DATA_MOST:
        raise ProtocolError(f"{len(data):,} bytes of data, of {DATA_MOST:,} at most")
    return bytes(data)


def _pack_ranges(ranges: tuple[tuple[int, int], ...]) -> bytes:
    return b"".join(_PAIR.pack(*each) for each in ranges)


def _parse_ranges(data: memoryview) -> tuple[tuple[int, int], ...]:
    if len(data) % _PAIR.size or len(data) > RANGES_MOST * _PAIR.size:
        raise ProtocolError(f"{len(data)} bytes are no ranges")
    before, ranges = -1, []
    for start, end in _PAIR.iter_unpack(data):
        if not before < start < end:
            raise ProtocolError("ranges are not empty, and stand in order and apart")
        ranges.append((start, end))
        before = end
    return tuple(ranges)


def _pack_volumes(volumes: tuple[VolumeInfo, ...]) -> bytes:
    parts = []
    for name, size, read_only in volumes:
        text = _pack_text(name)
        parts.append(_INFO.pack(size, read_only) + _COUNT.pack(len(text)) + text)
    return b"".join(parts)


def _parse_volumes(data: memoryview) -> tuple[VolumeInfo, ...]:
    volumes = []
    while len(data):
        size, read_only = _INFO.unpack_from(data)
        (length,) = _COUNT.unpack_from(data, _INFO.size)
        name = _parse_text(_exactly(data[_INFO.size + _COUNT.size :], length))
        if read_only > 1:
            raise ProtocolError(f"{read_only} is neither yes nor no")
        volumes.append(VolumeInfo(name, size, bool(read_only)))
        data = data[_INFO.size + _COUNT.size + length :]
    return tuple(volumes)


# ---- The table of all kinds


class _Layout(NamedTuple):
    kind: int
    make: type[Any]
    fixed: struct.Struct
    pack_rest: Callable[[Any], bytes] | None = None
    parse_rest: Callable[[memoryview], Any] | None = None


def _layout(kind: int, make: type[Any], fixed: str, rest: str = "") -> _Layout:
    pack_rest, parse_rest = _RESTS[rest]
    return _Layout(kind, make, struct.Struct("<" + fixed), pack_rest, parse_rest)


_RESTS: dict[str, tuple[Callable[[Any], bytes] | None, Callable[[memoryview], Any] | None]] = {
    "": (None, None),
    "text": (_pack_text, _parse_text),
    "texts": (_pack_texts, _parse_pair),
    "data": (_pack_data, _parse_data),
    "ranges": (_pack_ranges, _parse_ranges),
    "volumes": (_pack_volumes, _parse_volumes),
}
_KINDS = [
    _layout(1, Challenge, "H16s"),
    _layout(2, Hello, "H32s", "text"),
    _layout(10, ListVolumes, ""),
    _layout(11, Create, "Q", "text"),
    _layout(12, Copy, "?", "texts"),
    _layout(13, Resize, "Q", "text"),
    _layout(14, Delete, "", "text"),
    _layout(15, Open, "B", "text"),
    _layout(16, Reopen, "I"),
    _layout(17, Close, "I"),
    _layout(18, Read, "IQI?"),
    _layout(19, Write, "IQ?I", "data"),
    _layout(20, Checksum, "IQI"),
    _layout(21, Flush, "I", "ranges"),
    _layout(30, Done, ""),
    _layout(31, Failed, "B", "text"),
    _layout(32, Listing, "", "volumes"),
    _layout(33, Opened, "IQB?I"),
    _layout(34, Data, "I", "data"),
]
_BY_TYPE = {each.make: each for each in _KINDS}
_BY_KIND = {each.kind: each for each in _KINDS}
_MODES = frozenset((Mode.READ, Mode.WRITE))
_CODES = frozenset(Code)


def pack(number: int, message: Message) -> bytes:
    """A message in bytes.

    :param number: of the request, from 0 to 2**32 - 1.
    :raises ValueError: a text or the data is too long.
    """
    kind, _, fixed, pack_rest, _ = _BY_TYPE[type(message)]
    fields: tuple[Any, ...] = message
    if pack_rest is None:
        return _HEAD.pack(kind, number) + fixed.pack(*fields)
    return b"".join((_HEAD.pack(kind, number), fixed.pack(*fields[:-1]), pack_rest(fields[-1])))


def parse(data: bytes) -> tuple[int, Message]:
    """The number and the message that these bytes are.

    :raises ProtocolError: they are none.
    """
    try:
        kind, number = _HEAD.unpack_from(data)
        layout = _BY_KIND.get(kind)
        if layout is None:
            raise ProtocolError(f"there are no messages of kind {kind}")
        _, make, fixed, _, parse_rest = layout
        fields = fixed.unpack_from(data, _HEAD.size)
        start = _HEAD.size + fixed.size
        if fixed.pack(*fields) != data[_HEAD.size : start]:
            raise ProtocolError(f"the fields of {make.__name__} are not as they are written")
        rest = memoryview(data)[start:]
        if parse_rest is None:
            _end(rest)
            message = make(*fields)
        else:
            message = make(*fields, parse_rest(rest))
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"{len(data)} bytes are no message: {error}") from error
    if isinstance(message, Open | Opened) and message.mode not in _MODES:
        raise ProtocolError(f"a volume is not opened in mode {message.mode}")
    if isinstance(message, Failed) and message.code not in _CODES:
        raise ProtocolError(f"no failure has the code {message.code}")
    return number, message
