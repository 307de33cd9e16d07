"""A network of its own for another process, and a cable between it and this one's, of which frames can be lost."""

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

# Networks of this process's own: this end of the cable, and the one over there.
_IPV4 = IPv4Address("10.128.0.0") + 4 * (os.getpid() % 2**21)
_IPV6 = IPv6Address("fd00:213::") + (os.getpid() << 64)
HOSTS = {"ipv4": (str(_IPV4 + 1), str(_IPV4 + 2)), "ipv6": (str(_IPV6 + 1), str(_IPV6 + 2))}

# Classic BPF: a random number; whether it is above a limit; -1: it is a match; 0: it is none.
_BY_CHANCE = "4,32 0 0 4294963256,37 1 0 {limit},6 0 0 4294967295,6 0 0 0"


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


@dataclass
class Network:
    """:param name: of the namespace, and the stem of its interfaces' names."""

    name: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What runs a command in there."""
        return ("ip", "netns", "exec", self.name)

    def _ends(self) -> tuple[tuple[str, tuple[str, ...]], tuple[str, tuple[str, ...]]]:
        return (f"{self.name}a", ()), (f"{self.name}b", self.prefix)

    def cable(self, up: bool) -> None:
        run("ip", "link", "set", f"{self.name}a", "up" if up else "down")

    def packet_size(self, size: int) -> None:
        for interface, there in self._ends():
            run(*there, "ip", "link", "set", interface, "mtu", str(size))

    def lose(self, percent: int) -> None:
        """So many of the packets that leave either end go nowhere: into an interface that leads nowhere."""
        program = _BY_CHANCE.format(limit=2**32 * percent // 100)
        for interface, there in self._ends():
            run(*there, "ip", "link", "add", f"{interface}x", "type", "veth", "peer", "name", f"{interface}y")
            run(*there, "tc", "qdisc", "add", "dev", interface, "clsact")
            run(
                *(*there, "tc", "filter", "add", "dev", interface, "egress", "bpf", "bytecode", program),
                *("action", "mirred", "egress", "redirect", "dev", f"{interface}x"),
            )

    def emulate(self, *what: str) -> None:
        """What netem calls it, in both directions; the test is skipped where the kernel has no netem."""
        for interface, there in self._ends():
            try:
                run(*there, "tc", "qdisc", "add", "dev", interface, "root", "netem", *what)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this kernel has no netem: {error.stderr.strip()}")


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """Skips the test where this user or this machine cannot have one."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc"))):
        pytest.skip("network namespaces need root, and the programs ip and tc")
    made = Network(f"aiov{os.getpid()}"[:13])
    near, far = f"{made.name}a", f"{made.name}b"
    try:
        try:
            run("ip", "netns", "add", made.name)
            run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", made.name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine gives no network namespace and no veth: {error.stderr.strip()}")
        for number, (interface, there) in enumerate(made._ends()):
            run(*there, "ip", "address", "add", f"{HOSTS['ipv4'][number]}/30", "dev", interface)
            run(*there, "ip", "address", "add", f"{HOSTS['ipv6'][number]}/64", "dev", interface, "nodad")
            run(*there, "ip", "link", "set", interface, "up")
        Path(f"/proc/sys/net/ipv6/conf/{near}/keep_addr_on_down").write_text("1")
        yield made
    finally:
        for interface in (near, f"{near}x"):
            subprocess.run(("ip", "link", "delete", interface), capture_output=True, timeout=20, check=False)
        subprocess.run(("ip", "netns", "delete", made.name), capture_output=True, timeout=20, check=False)
