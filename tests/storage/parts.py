"""Helpers for tests of the storage server: a server in the test process, and its clients."""

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
        """Connect a client: "owner", or the client of the token."""
        async with (
            self.device.resource_domain() as domain,
            connect(HOST, self.serving.port, token or self.serving.token_file.read_text(), domain=domain) as storage,
        ):
            yield storage

    def add(self, name: str, **rights: Mode) -> str:
        """Add a client with rights to volumes, as the command `access` does; return its token."""
        with contextlib.closing(Catalog(self.root / "catalog.sqlite")) as catalog:
            token = catalog.add_client(name)
        for volume, mode in rights.items():
            self.allow(name, volume, mode)
        return token

    def allow(self, name: str, volume: str, mode: Mode) -> None:
        """Set a client's right to a volume."""
        with contextlib.closing(Catalog(self.root / "catalog.sqlite")) as catalog:
            catalog.allow(name, volume, mode)

    def metric(self, name: str, **labels: str) -> float:
        """Return the value of a metric."""
        return self.serving.metrics.value(name, **labels)


@contextlib.asynccontextmanager
async def serve_here(
    device: Device, root: Path, backing: str, disk: Disk | None = None, **settings: Any
) -> AsyncIterator[Server]:
    """Serve a folder."""
    if backing == "mapped" and not device.software:
        pytest.skip("kernels do not pin file pages for devices")
    chosen = Settings(backing=cast(BackingName, backing), **settings)
    async with serving(root, HOST, device=device, settings=chosen, disk=disk) as served:
        yield Server(device, served, root)
