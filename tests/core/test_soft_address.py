"""Names of software devices: valid ones, the errors for others, and that the device agrees."""

import contextlib
import os
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import assume, given, strategies as st

from aioverbs import VerbsError
from aioverbs._core.software.software import Context
from aioverbs._providers import software
from aioverbs._providers.software_names import DEFAULT_PORT, SoftAddress, is_software, parse_name

HOSTS = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6))
PORTS = st.integers(1, 65535)
UNUSABLE_NETWORKS = "0.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "::/96", "::ffff:0:0/96", "fe80::/10", "ff00::/8"


def make(host: IPv4Address | IPv6Address, port: int) -> SoftAddress | None:
    try:
        return SoftAddress(host, port)
    except ValueError:
        return None


@given(host=HOSTS, port=PORTS)
def test_an_address_is_parsed_from_its_text(host: IPv4Address | IPv6Address, port: int) -> None:
    address = make(host, port)
    assume(address)
    assert address is not None
    assert SoftAddress.parse(str(address)) == address
    assert parse_name(address.name) == address
    assert is_software(address.name)
    assert len(address.name) < 64, "the name does not fit in struct ibv_device"


@given(text=st.one_of(st.text(max_size=30), st.text("0123456789abcdef.:[]%@", max_size=30)))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        address = SoftAddress.parse(text)
        assert SoftAddress.parse(str(address)) == address


def test_without_an_address() -> None:
    assert parse_name("soft0") is None
    assert is_software("soft0")
    assert not is_software("soft00")
    assert not is_software("mlx5_0")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1", "10.0.0.1", DEFAULT_PORT),
        ("[fd00::1]", "fd00::1", DEFAULT_PORT),
        ("[fd00:0::0:1]:65535", "fd00::1", 65535),
        ("127.0.0.1:07471", "127.0.0.1", 7471),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = parse_name(f"soft0@{text}")
    assert address is not None
    assert (str(address.host), address.port) == (host, port)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"the address is empty: write an address such as 10\.0\.0\.1:7470 or \[fd00::1\]:7470"),
        ("fd00::1", r"must be in brackets, as in \[fd00::1\]:7470, got 'fd00::1'"),
        ("[10.0.0.1]:7", "brackets are for IPv6: write 10.0.0.1:7"),
        ("[fd00::1", "is not an address: write"),
        ("host:7470", "'host' in 'host:7470' is not an IP address, and host names are not resolved: write"),
        ("10.0.0.1:", "'' in '10.0.0.1:' is not a port: write"),
        ("10.0.0.1:\u0667", "is not a port"),
        ("10.0.0.1:0", "`port` must be 1 to 65535, got 0"),
        ("10.0.0.1:65536", "got 65536"),
        ("0.0.0.0:7470", "not the address of one host: give one of a network"),
        ("[::]", "not the address of one host"),
        ("239.1.2.3", "not the address of one host"),
        ("[fe80::1]", "valid on one link only"),
        ("[fd00::1%eth0]", "valid on one link only"),
        ("[::ffff:10.0.0.1]", "maps an IPv4 address: write 10.0.0.1"),
        ("[::1d2e:ffff:a00:1]", "maps an IPv4 address: write 10.0.0.1"),
    ],
)
def test_invalid_addresses_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SoftAddress.parse(text)
    with pytest.raises(ValueError, match="is not the name of a software device: .*" + message):
        software.open_context(f"soft0@{text}")


@given(host=st.sampled_from(UNUSABLE_NETWORKS).flatmap(lambda network: st.ip_addresses(network=network)), port=PORTS)
def test_the_device_refuses_the_same(host: IPv4Address | IPv6Address, port: int) -> None:
    assume(not host.is_loopback)
    with pytest.raises(ValueError, match="cannot be a software device's address"):
        SoftAddress(host, port)
    with pytest.raises(VerbsError, match="EINVAL"):
        Context.open(address=(host.packed, port))


def test_a_device_has_the_name_and_the_gid() -> None:
    host = IPv4Address((127 << 24) + 0x800000 + os.getpid())  # not used by any other test that runs now
    address = SoftAddress(host, 7471)
    context = software.open_context(address.name)
    plain = software.open_context()
    again = software.open_context(str(address.name))
    try:
        assert context.name == again.name == address.name
        gids = [context.query_gid(1, index) for index in range(2)]
        assert gids[1] == bytes(8) + (7471).to_bytes(2) + b"\xff\xff" + host.packed
        assert [again.query_gid(1, index) for index in range(2)] == gids
        assert not {*gids} & {plain.query_gid(1, index) for index in range(2)}
        assert context.query_device().node_guid == gids[0][8:] != plain.query_device().node_guid
    finally:
        for each in (context, plain, again):
            each.destroy()


def test_addresses_of_wrong_length_are_refused() -> None:
    for address in (b"", bytes(5), bytes(17)):
        with pytest.raises(ValueError, match=f"4 or 16 bytes, got {len(address)}"):
            Context.open(address=(address, 1))
