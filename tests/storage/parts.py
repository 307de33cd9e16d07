"""What the tests of the storage server have in common: a server here, and clients of it."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from storage_server.catalog import Catalog
from storage_server.client import Storage, connect
from storage_server.files import Disk
from storage_server.protocol import Mode
from storage_server.server import BackingName, Serving, Settings, serving

from aioverbs import Device

__all__ = ["BLOCK", "HOST", "Server", "serve_here"]

BLOCK = 4096
HOST = "127.0.0.1"


class Server:
    """A server in this process, for clients in this process."""

    def __init__(self, device: Device, serving: Serving, root: Path) -> None:
        self.device = device
        self.serving = serving
        self.root = root

    @contextlib.asynccontextmanager
    async def client(self, token: str | None = None) -> AsyncIterator[Storage]:
        """A client: "owner", or whose token that is."""
        async with (
            self.device.resource_domain() as domain,
            connect(HOST, self.serving.port, token or self.serving.token_file.read_text(), domain=domain) as storage,
        ):
            yield storage

    def add(self, name: str, **rights: Mode) -> str:
        """A client that may do so much with these volumes, as the command `access` makes it; its token."""
        with contextlib.closing(Catalog(self.root / "catalog.sqlite")) as catalog:
            token = catalog.add_client(name)
        for volume, mode in rights.items():
            self.allow(name, volume, mode)
        return token

    def allow(self, name: str, volume: str, mode: Mode) -> None:
        """What a client may do from now on."""
        with contextlib.closing(Catalog(self.root / "catalog.sqlite")) as catalog:
            catalog.allow(name, volume, mode)

    def metric(self, name: str, **labels: str) -> float:
        """What the server counted."""
        return self.serving.metrics.value(name, **labels)


@contextlib.asynccontextmanager
async def serve_here(
    device: Device, root: Path, backing: str, disk: Disk | None = None, **settings: Any
) -> AsyncIterator[Server]:
    """A server of a folder."""
    if backing == "mapped" and not device.software:
        pytest.skip("kernels do not pin pages of files for devices")
    chosen = Settings(backing=cast(BackingName, backing), **settings)
    async with serving(root, HOST, device=device, settings=chosen, disk=disk) as served:
        yield Server(device, served, root)
