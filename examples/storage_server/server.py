"""The server: volumes, sessions and a pool of loops, put together.

    clients ==RDMA==> memory of the volumes         one-sided reads and writes: no program of the server's runs
       \\--messages--> session (session.py)          on a worker of the pool: who may do what, flushes
                         |        \\--> commits.py   group commit --> backings.py --> files.py
                         \\--> volumes.py            on the server's loop: make, open, resize, copy, delete
                                 \\--> catalog.py    in a thread: SQLite

The workers are threads, not processes: a volume's memory is registered once and serves the queue pairs of all of them,
and a flush of one and a resize of another find the same `Volume`. The interpreter's lock costs little here, since what
is done often is done without it: one-sided requests by the device, syncs and large copies by the kernel.
"""

import contextlib
import functools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aioverbs
from aioverbs import ConnectionSettings, Device, MessageModel, WorkerPool
from storage_server.files import Disk
from storage_server.folder import opened_folder
from storage_server.metrics import Metrics
from storage_server.protocol import MESSAGE_MOST
from storage_server.session import Shared, serve_client
from storage_server.volumes import Volumes

__all__ = ["BackingName", "Serving", "Settings", "serving"]

BackingName = Literal["auto", "mapped", "cached"]


@dataclass(frozen=True)
class Settings:
    """How a server serves.

    :param workers: loops, with a thread each, that have the connections.
    :param loop: which event loops: "asyncio" or "uvloop".
    :param backing: "mapped": clients reach the files' own pages; "cached": memory before them, which is what RDMA
        devices need; "auto": as the device needs it.
    :param memory: bytes that all volumes which are open have at most, where they are cached.
    :param spin_us: for so many microseconds a worker that answered looks for what comes next before it sleeps.
    :param max_connections: clients that may be connected at once.
    """

    workers: int = 2
    loop: Literal["asyncio", "uvloop"] = "asyncio"
    backing: BackingName = "auto"
    memory: int = 1 << 30
    spin_us: int = 50
    max_connections: int = 1000

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ValueError(f"a cache has 1 byte or more, not {self.memory}")


@dataclass(frozen=True)
class Serving:
    """A server that serves.

    :param port: where it listens.
    :param token_file: that of the client "owner", which may do everything; made with the folder.
    """

    port: int
    metrics: Metrics
    volumes: Volumes
    token_file: Path


@contextlib.asynccontextmanager
async def serving(
    root: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    device: Device,
    settings: Settings | None = None,
    disk: Disk | None = None,
) -> AsyncIterator[Serving]:
    """Serve the volumes of a folder, for the time of the block.

    :param root: the folder: made where it is not there, and put right where the server before was killed.
    :param device: a device that is open.
    :param disk: the file layer; None: this machine's.
    :raises InvalidError: another server has the folder, or its catalog and its files do not fit.
    """
    chosen = settings if settings is not None else Settings()
    metrics = Metrics()
    mapped = chosen.backing == "mapped" or (chosen.backing == "auto" and device.software)
    model = MessageModel.LOW_LATENCY if chosen.spin_us else MessageModel.DEFAULT
    connections = ConnectionSettings(
        max_message=MESSAGE_MOST, spin_ns=chosen.spin_us * 1000 if chosen.spin_us else None
    )
    with opened_folder(root, disk or Disk()) as folder:
        async with WorkerPool(device, chosen.workers, loop=chosen.loop, message_model=model) as pool:
            volumes = Volumes(folder, pool.pd, metrics, mapped=mapped, memory=chosen.memory)
            shared = Shared(volumes, metrics)
            server = aioverbs.serve(
                functools.partial(serve_client, shared),
                host,
                port,
                pool=pool,
                settings=connections,
                max_connections=chosen.max_connections,
                drain_timeout_s=0,  # clients stay for as long as they like: there is nothing to wait for
            )
            async with volumes.running(), server:
                yield Serving(server.port, metrics, volumes, root / "owner.token")
