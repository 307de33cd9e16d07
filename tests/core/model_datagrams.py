"""The 40 bytes of GRH in front of a datagram's data, as RoCE v2 delivers them."""

import struct

from tests.core.model import AddressHandle

HEADER = 40
PORT_MTU = 4096
_MAPPED = bytes(10) + b"\xff\xff"


def _checksum(header: bytes) -> int:
    total: int = sum(struct.unpack("!10H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total ^ 0xFFFF


def _payload(length: int, immediate: bool) -> int:
    """Return the length behind the IP header: UDP, BTH, DETH, immediate, data padded to 4 bytes, and ICRC."""
    return 8 + 12 + 8 + 4 * immediate + -(-length // 4) * 4 + 4


def header(ah: AddressHandle, length: int, immediate: bool) -> bytes:
    """Return an IPv4 header in the last 20 bytes if both ends have such addresses, else an IPv6 header."""
    payload, udp = _payload(length, immediate), 17
    if not (ah.source.startswith(_MAPPED) and ah.target.startswith(_MAPPED)):
        first = 6 << 28 | ah.traffic_class << 20 | ah.flow_label
        return struct.pack("!IHBB", first, payload, udp, ah.hop_limit) + ah.source + ah.target

    def version_4(checksum: int) -> bytes:
        do_not_fragment = 0x4000
        fixed = struct.pack(
            "!BBHHHBBH", 0x45, ah.traffic_class, 20 + payload, 0, do_not_fragment, ah.hop_limit, udp, checksum
        )
        return fixed + ah.source[12:] + ah.target[12:]

    return bytes(20) + version_4(_checksum(version_4(0)))
