"""Simulated machines: trees of files as below /sys, /dev and /proc, and results of the libraries' probe."""

import errno
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from aioverbs.cli.machine import Library, Machine, Probe, Trial, inspect_machine

KERNEL = "6.1.0-test"
LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe12:3456"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
UNLIMITED = "Max locked memory         unlimited            unlimited            bytes"
LIBRARIES = Probe(
    libibverbs=Library("/usr/lib/libibverbs.so.1.14.44.0", "44.0"),
    librdmacm=Library("/usr/lib/librdmacm.so.1.3.44.0", "44.0"),
)
GOOD = Trial()


class Tree:
    """File tree of a machine without RDMA, to which a test adds devices."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.probe = LIBRARIES
        self.refused: dict[str, int] = {}
        self.environment: dict[str, str] = {}
        self.write("etc/os-release", "ID=debian")
        self.write("proc/self/limits", UNLIMITED)
        self.write("sys/class/net/lo/operstate", "unknown")

    def write(self, path: str, text: str = "") -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def device(
        self,
        name: str = "rxe0",
        *,
        state: str = "4: ACTIVE",
        physical: str = "5: LinkUp",
        link_layer: str = "Ethernet",
        gids: Mapping[int, str] = {0: LINK_LOCAL, 1: IPV4},
        netdev: str = "eth0",
        uverbs: str = "uverbs0",
        trial: Trial = GOOD,
        gid_type: str = "RoCE v2",
        ipv6: bool = True,
    ) -> None:
        """Add an RDMA device, which is usable unless an argument says otherwise."""
        port = f"sys/class/infiniband/{name}/ports/1"
        self.write(f"{port}/state", state)
        self.write(f"{port}/phys_state", physical)
        self.write(f"{port}/link_layer", link_layer)
        for index in range(3):
            self.write(f"{port}/gids/{index}", gids.get(index, ":".join(["0000"] * 8)))
            self.write(f"{port}/gid_attrs/types/{index}", gid_type if index in gids else "")
            self.write(f"{port}/gid_attrs/ndevs/{index}", netdev if index in gids else "")
        if link_layer == "Ethernet":
            self.write(f"sys/class/net/{netdev}/operstate", "up")
            self.write(f"proc/sys/net/ipv6/conf/{netdev}/disable_ipv6", "0" if ipv6 else "1")
            self.write(f"sys/class/infiniband/{name}/parent", netdev)
        self.write(f"sys/class/infiniband_verbs/{uverbs}/ibdev", name)
        self.write(f"dev/infiniband/{uverbs}")
        self.write("dev/infiniband/rdma_cm")
        trials = {**self.probe.trials, name: trial}
        self.probe = replace(self.probe, listed=(*self.probe.listed, name), trials=trials)

    def try_open(self, path: Path) -> int:
        """Return the errno of opening a file: that of `refused`, else 0."""
        assert path.is_relative_to(self.root)
        if not path.exists():
            return errno.ENOENT
        return self.refused.get(path.name, 0)

    def inspect(self) -> Machine:
        return inspect_machine(
            self.root, try_open=self.try_open, probe=lambda: self.probe, kernel=KERNEL, environment=self.environment
        )
