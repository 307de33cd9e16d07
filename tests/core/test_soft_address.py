"""Names of software devices: valid ones, the errors for others, and that the device agrees."""

import contextlib
import errno
import os
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import assume, given, strategies as st

from aioverbs import VerbsError
from aioverbs._core.software.software import Context
from aioverbs._providers import software, software_hosts
from aioverbs._providers.software_names import (
    DEFAULT_PORT,
    SoftAddress,
    SoftHost,
    is_software,
    parse_address,
    parse_name,
)
from tests.core.children import in_child

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
    assert parse_address(str(address)) == address
    assert parse_name(address.name) == address
    assert is_software(address.name)
    assert len(address.name) < 64, "the name does not fit in struct ibv_device"


@given(text=st.one_of(st.text(max_size=30), st.text("0123456789abcdef.:[]%@-_", max_size=30)))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        address = parse_address(text)
        assert parse_address(str(address)) == address


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
        ("10.0.0.1:0", "10.0.0.1", 0),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    address = parse_name(f"soft0@{text}")
    assert isinstance(address, SoftAddress)
    assert (str(address.host), address.port) == (host, port)


@pytest.mark.parametrize(
    ("text", "name", "port"),
    [
        ("storage-1", "storage-1", DEFAULT_PORT),
        ("node_3.rack-7.example.org:0", "node_3.rack-7.example.org", 0),
        ("localhost:7471", "localhost", 7471),
        ("1and1.example:7471", "1and1.example", 7471),
        ("a" * 63 + ".b", "a" * 63 + ".b", DEFAULT_PORT),
        ("storage-1.example.org.:0", "storage-1.example.org.", 0),
        ("node.0xg", "node.0xg", DEFAULT_PORT),
        (".".join(["a" * 63] * 3 + ["a" * 61, ""]), ".".join(["a" * 63] * 3 + ["a" * 61, ""]), DEFAULT_PORT),
    ],
)
def test_host_names(text: str, name: str, port: int) -> None:
    assert parse_name(f"soft0@{text}") == SoftHost(name, port)


def choose(*found: str, port: int = 0) -> str:
    return str(SoftHost("storage-1", port).choose(map(ip_address, found)))


def test_the_address_of_a_host_name_is_one_that_tells_the_port_to_other_hosts() -> None:
    assert choose("10.0.0.2", "10.0.0.1") == "10.0.0.2:0", "the order of the resolver"
    assert choose("127.0.1.1", "fd00::1", "10.0.0.1") == "10.0.0.1:0"
    assert choose("::1", "fd00::1", port=7) == "[fd00::1]:7"
    assert choose("127.0.1.1", "fd00::1", port=7) == "[fd00::1]:7"
    assert choose("127.0.1.1") == "127.0.1.1:0"
    assert choose("fe80::1", "169.254.0.1", "10.0.0.1") == "10.0.0.1:0"


@pytest.mark.parametrize(
    ("found", "port", "reason"),
    [
        ((), 7, "it has no address"),
        (("fe80::1",), 7, "valid on one link only"),
        (("fd00::1",), 0, "port 0 needs an IPv4"),
    ],
)
def test_a_host_name_without_a_usable_address(found: tuple[str, ...], port: int, reason: str) -> None:
    with pytest.raises(ValueError, match=f"'storage-1' stands for no address that a device can have: .*{reason}"):
        choose(*found, port=port)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"the address is empty: write an address such as 10\.0\.0\.1:7470, \[fd00::1\]:7470 or storage-1:7470"),
        ("fd00::1", r"must be in brackets, as in \[fd00::1\]:7470, got 'fd00::1'"),
        ("[10.0.0.1]:7", "brackets are for IPv6: write 10.0.0.1:7"),
        ("[fd00::1", "is not an address: write"),
        ("10.0.0:7470", "'10.0.0' in '10.0.0:7470' is neither an IP address nor a host name: write"),
        ("256.0.0.1", "'256.0.0.1' in '256.0.0.1' is neither an IP address nor a host name: write"),
        ("0x0a000001:0", "'0x0a000001' in '0x0a000001:0' is neither an IP address nor a host name: write"),
        ("10.0.0.0X1", "neither an IP address nor a host name"),
        ("10.0.0.1.", "neither an IP address nor a host name"),
        ("storage-1..", "neither an IP address nor a host name"),
        (".", "neither an IP address nor a host name"),
        (".".join(["a" * 63] * 3 + ["a" * 62, ""]), "neither an IP address nor a host name"),
        ("a host", "'a host' in 'a host' is neither an IP address nor a host name: write"),
        ("-host", "neither an IP address nor a host name"),
        ("a" * 64, "neither an IP address nor a host name"),
        (".".join(["a" * 63] * 4), "neither an IP address nor a host name"),
        ("h\u00f6st", "neither an IP address nor a host name"),
        ("[storage-1]:7470", "brackets are for IPv6: write storage-1:7470"),
        ("storage-1:65536", "`port` must be 0 to 65535, got 65536"),
        ("10.0.0.1:", "'' in '10.0.0.1:' is not a port: write"),
        ("10.0.0.1:\u0667", "is not a port"),
        ("[fd00::1]:0", "port 0 needs an IPv4 address, got fd00::1: peers find an IPv6 device by its address alone"),
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
        parse_address(text)
    with pytest.raises(ValueError, match="is not the name of a software device: .*" + message):
        software.open_context(f"soft0@{text}")


@given(host=st.sampled_from(UNUSABLE_NETWORKS).flatmap(lambda network: st.ip_addresses(network=network)), port=PORTS)
def test_the_device_refuses_the_same(host: IPv4Address | IPv6Address, port: int) -> None:
    assume(not host.is_loopback)
    with pytest.raises(ValueError, match="cannot be a software device's address"):
        SoftAddress(host, port)
    with pytest.raises(VerbsError, match="EINVAL"):
        Context.open(address=(host.packed, port))


def loopback(number: int) -> IPv4Address:
    """Return an address that no other test which runs now uses."""
    return IPv4Address((127 << 24) + (number << 20) + os.getpid() % (1 << 20))


def test_port_0_is_one_that_the_system_chooses_once_for_each_address() -> None:
    name = f"soft0@{loopback(4)}:0"
    first = software.open_context(name)
    chosen = parse_name(first.name)
    assert isinstance(chosen, SoftAddress)
    assert chosen.port > 0
    assert first.query_gid(1, 1) == bytes(8) + chosen.port.to_bytes(2) + b"\xff\xff" + chosen.host.packed
    assert first.fabric().address == str(chosen)
    again, by_port, other = map(software.open_context, (name, chosen.name, f"soft0@{loopback(5)}:0"))
    assert again.name == by_port.name == first.name
    assert again.query_gid(1, 0) == by_port.query_gid(1, 0) == first.query_gid(1, 0)
    assert other.name != first.name
    with socket.socket() as program, pytest.raises(OSError, match="in use"):
        program.bind((str(chosen.host), chosen.port))
    for each in (first, again, by_port, other):
        each.destroy()
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            thief.bind((str(chosen.host), chosen.port))
    later = software.open_context(name)
    assert later.name == first.name, "peers find it again"
    later.destroy()


def test_a_forked_child_gets_a_port_of_its_own() -> None:
    name = f"soft0@{loopback(6)}:0"
    context = software.open_context(name)

    def child() -> str:
        own = software.open_context(name)
        own_name = own.name
        own.destroy()
        return own_name

    assert in_child(child) != context.name
    context.destroy()


def test_port_0_of_an_address_that_this_host_lacks() -> None:
    with pytest.raises(VerbsError, match=r"EADDRNOTAVAIL .* a TCP port of soft0@192\.0\.2\.1:0: "):
        software.open_context("soft0@192.0.2.1:0")
    with pytest.raises(VerbsError, match="EINVAL"):
        Context.open(address=(IPv6Address("::1").packed, 0))


class Resolver:
    """In place of the system's resolver: answers that the test sets, and the names that were asked for."""

    def __init__(self) -> None:
        self.answer: tuple[str, ...] = ()
        self.asked: list[str] = []

    def getaddrinfo(self, name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        self.asked.append(name)
        return [(None, None, None, "", (each, 0)) for each in self.answer]


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    resolver = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", resolver.getaddrinfo)
    monkeypatch.setattr(software_hosts, "_resolved", {})
    return resolver


def test_a_host_name_is_resolved_once(resolver: Resolver, caplog: pytest.LogCaptureFixture) -> None:
    resolver.answer = str(loopback(7)), str(loopback(8))
    first = software.open_context("soft0@storage-1:0")
    resolver.answer = str(loopback(8)), str(loopback(7))
    second, other_port = map(software.open_context, ("soft0@storage-1:0", "soft0@storage-1:7471"))
    assert resolver.asked == ["storage-1"]
    assert first.name == second.name
    assert first.name.startswith(f"soft0@{loopback(7)}:")
    assert other_port.name == f"soft0@{loopback(7)}:7471"
    assert caplog.messages == [f"storage-1 is {loopback(7)}, which no other host reaches: see /etc/hosts"]
    for each in (first, second, other_port):
        each.destroy()


def test_a_host_name_is_resolved_again_after_a_wrong_answer(resolver: Resolver) -> None:
    resolver.answer = "203.0.113.5", "203.0.113.6"
    with pytest.raises(
        VerbsError, match=r"EADDRNOTAVAIL .*the host name 'storage-1' .*: it stands for 203.0.113.5, 203.0.113.6, but"
    ):
        software.open_context("soft0@storage-1:0")
    resolver.answer = ("0.0.0.0",)
    with pytest.raises(VerbsError, match=r"'storage-1' stands for no address that a device can have: 0.0.0.0"):
        software.open_context("soft0@storage-1:0")
    resolver.answer = (str(loopback(7)),)
    software.open_context("soft0@storage-1:0").destroy()


def test_a_host_name_is_resolved_again_after_the_host_has_lost_its_address(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver.answer = (str(loopback(7)),)
    software.open_context("soft0@storage-1:0").destroy()
    monkeypatch.setattr(software_hosts, "_is_local", loopback(7).__ne__)
    resolver.answer = (str(loopback(8)),)
    context = software.open_context("soft0@storage-1:0")
    assert context.name.startswith(f"soft0@{loopback(8)}:")
    context.destroy()


def test_addresses_of_this_host_are_chosen(resolver: Resolver) -> None:
    resolver.answer = "203.0.113.5", "2001:db8::5", "fe80::1", "fe80::1%lo", "fe80::1%x", str(loopback(7))
    context = software.open_context("soft0@storage-1:7471")
    assert context.name == f"soft0@{loopback(7)}:7471"
    context.destroy()


def test_descriptors_that_run_out_are_no_missing_address(resolver: Resolver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many")

    resolver.answer = (str(loopback(7)),)
    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(VerbsError, match="too many"):
        software.open_context("soft0@storage-1:0")


@pytest.mark.parametrize("name", ["storage-1", "Storage-1.example.org"])
@pytest.mark.parametrize("unusable", [(), ("2001:db8::1",), ("fe80::1",)])
def test_the_hosts_own_name_is_not_a_loopback_address(
    resolver: Resolver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    unusable: tuple[str, ...],
) -> None:
    """Even if it has another address, which a device with a port that the system chooses cannot have."""
    resolver.answer = "127.0.1.1", *unusable
    monkeypatch.setattr(software_hosts, "_is_local", lambda address: True)
    monkeypatch.setattr(socket, "gethostname", lambda: "storage-1")
    monkeypatch.setattr(software_hosts, "_outward", lambda: map(ip_address, ("10.0.0.5", "fd00::5")))
    host = SoftHost(name, 0)
    with caplog.at_level("INFO", "aioverbs"):
        assert str(software_hosts.resolve_host(host)) == "10.0.0.5:0"
    assert caplog.messages == [f"{name} is 10.0.0.5, because /etc/hosts says 127.0.1.1, which no other host reaches"]
    monkeypatch.setattr(software_hosts, "_outward", lambda: ())
    monkeypatch.setattr(software_hosts, "_resolved", {})
    assert str(software_hosts.resolve_host(host)) == "127.0.1.1:0"
    assert caplog.messages[1:] == [f"{name} is 127.0.1.1, which no other host reaches: see /etc/hosts"]


def test_the_addresses_of_default_routes_are_those_of_this_host() -> None:
    for address in software_hosts._outward():
        assert software_hosts._is_local(address)
        assert not address.is_loopback


def test_a_host_name_that_cannot_be_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: object, **__: object) -> list[tuple[object, ...]]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(VerbsError, match=r"EADDRNOTAVAIL .*the host name 'storage-9' .*Name or service not known"):
        software.open_context("soft0@storage-9")


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
