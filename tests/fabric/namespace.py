"""A network namespace for another process, connected to this one by a veth pair on which packets can be dropped."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest

__all__ = ["HOSTS", "Network", "network"]

# Subnets unique to this process; first the address of this end of the veth pair, then that of the other.
_IPV4 = IPv4Address("10.128.0.0") + 4 * (os.getpid() % 2**21)
_IPV6 = IPv6Address("fd00:213::") + (os.getpid() << 64)
HOSTS = {"ipv4": (str(_IPV4 + 1), str(_IPV4 + 2)), "ipv6": (str(_IPV6 + 1), str(_IPV6 + 2))}

# Classic BPF: load a random number, compare with a limit; return -1 for a match and 0 for none.
_DROP_AT_RANDOM = "4,32 0 0 4294963256,37 1 0 {limit},6 0 0 4294967295,6 0 0 0"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


@dataclass
class Network:
    """A network namespace and its interfaces.

    :param name: of the namespace, and the stem of the names of its interfaces.
    """

    name: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that runs another command in the namespace."""
        return ("ip", "netns", "exec", self.name)

    def _ends(self) -> tuple[tuple[str, tuple[str, ...]], tuple[str, tuple[str, ...]]]:
        return (f"{self.name}a", ()), (f"{self.name}b", self.prefix)

    def set_link(self, up: bool) -> None:
        run("ip", "link", "set", f"{self.name}a", "up" if up else "down")

    def set_mtu(self, size: int) -> None:
        for interface, prefix in self._ends():
            run(*prefix, "ip", "link", "set", interface, "mtu", str(size))

    def drop(self, percent: int) -> None:
        """Drop `percent` % of the packets that leave either end, by redirecting them to an unconnected interface."""
        program = _DROP_AT_RANDOM.format(limit=2**32 * percent // 100)
        for interface, prefix in self._ends():
            run(*prefix, "ip", "link", "add", f"{interface}x", "type", "veth", "peer", "name", f"{interface}y")
            run(*prefix, "tc", "qdisc", "add", "dev", interface, "clsact")
            run(
                *(*prefix, "tc", "filter", "add", "dev", interface, "egress", "bpf", "bytecode", program),
                *("action", "mirred", "egress", "redirect", "dev", f"{interface}x"),
            )

    def emulate(self, *settings: str) -> None:
        """Apply netem settings in both directions; skip the test if the kernel has no netem."""
        for interface, prefix in self._ends():
            try:
                run(*prefix, "tc", "qdisc", "add", "dev", interface, "root", "netem", *settings)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this kernel has no netem: {error.stderr.strip()}")


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Create a network namespace; skip the test if this user or this machine cannot."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc"))):
        pytest.skip("network namespaces need root, and the programs ip and tc")
    created = Network(f"aiov{os.getpid()}"[:13])
    near, far = f"{created.name}a", f"{created.name}b"
    try:
        try:
            run("ip", "netns", "add", created.name)
            run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", created.name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine gives no network namespace and no veth: {error.stderr.strip()}")
        for number, (interface, prefix) in enumerate(created._ends()):
            run(*prefix, "ip", "address", "add", f"{HOSTS['ipv4'][number]}/30", "dev", interface)
            run(*prefix, "ip", "address", "add", f"{HOSTS['ipv6'][number]}/64", "dev", interface, "nodad")
            run(*prefix, "ip", "link", "set", interface, "up")
        Path(f"/proc/sys/net/ipv6/conf/{near}/keep_addr_on_down").write_text("1")
        yield created
    finally:
        for interface in (near, f"{near}x"):
            subprocess.run(("ip", "link", "delete", interface), capture_output=True, timeout=20, check=False)
        subprocess.run(("ip", "netns", "delete", created.name), capture_output=True, timeout=20, check=False)
