"""The server: volumes, sessions and a pool of worker loops.

    clients ==RDMA==> memory of the volumes         one-sided reads and writes: no code of the server runs
       \\--messages--> session (session.py)          on a worker of the pool: authentication, requests, flushes
                         |        \\--> commits.py   group commit --> backings.py --> files.py
                         \\--> volumes.py            on the server's loop: create, open, resize, copy, delete
                                 \\--> catalog.py    in a thread: SQLite

The workers are threads, not processes: a volume's memory is registered once and serves the queue pairs of all workers,
and a flush on one worker and a resize on another share one `Volume`. The GIL costs little here, since the frequent
operations run without it: one-sided requests in the device, syncs and large copies in the kernel.
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
from storage_server.metrics import Metrics
from storage_server.protocol import MAX_MESSAGE
from storage_server.session import Shared, serve_client
from storage_server.volume_store import open_volume_store
from storage_server.volumes import Volumes

__all__ = ["BackingName", "Serving", "Settings", "serving"]

BackingName = Literal["auto", "mapped", "cached"]


@dataclass(frozen=True)
class Settings:
    """Settings of a server.

    :param workers: number of worker threads, each with an event loop.
    :param loop: event loop implementation: "asyncio" or "uvloop".
    :param backing: "mapped": clients access the files' own pages; "cached": they access a cache, which RDMA devices
        need; "auto": choose by the device.
    :param memory: limit of all caches together, in bytes.
    :param spin_us: microseconds for which a worker polls for the next request after an answer, before it sleeps.
    :param max_connections: limit of concurrent clients.
    :raises ValueError: `memory` is less than 1.
    """

    workers: int = 2
    loop: Literal["asyncio", "uvloop"] = "asyncio"
    backing: BackingName = "auto"
    memory: int = 1 << 30
    spin_us: int = 50
    max_connections: int = 1000

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ValueError(f"`memory` must be at least 1 byte, got {self.memory}")


@dataclass(frozen=True)
class Serving:
    """A running server. Made by `serving`.

    :param port: TCP port on which it listens.
    :param metrics: its counters.
    :param volumes: its volumes.
    :param token_file: path of the file with the token of the client "owner", which may do everything.
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
    """Serve the volumes of a folder for the duration of the block; yield the server's port, counters and volumes.

    :param root: the folder. It is created if it is missing, and repaired if the last server crashed.
    :param host: address to listen on.
    :param port: TCP port; 0 for a free one.
    :param device: an open device.
    :param settings: settings of the server; None for the defaults.
    :param disk: the file layer; None for this machine's file system.
    :raises InvalidError: another server uses the folder, or its catalog and files do not match.
    :raises OSError: the folder cannot be written to, or the port is taken.
    """
    chosen = settings if settings is not None else Settings()
    metrics = Metrics()
    mapped = chosen.backing == "mapped" or (chosen.backing == "auto" and device.software)
    model = MessageModel.LOW_LATENCY if chosen.spin_us else MessageModel.DEFAULT
    connections = ConnectionSettings(max_message=MAX_MESSAGE, spin_ns=chosen.spin_us * 1000 if chosen.spin_us else None)
    with open_volume_store(root, disk or Disk()) as store:
        async with WorkerPool(device, chosen.workers, loop=chosen.loop, message_model=model) as pool:
            volumes = Volumes(store, pool.pd, metrics, mapped=mapped, memory=chosen.memory)
            shared = Shared(volumes, metrics)
            server = aioverbs.serve(
                functools.partial(serve_client, shared),
                host,
                port,
                pool=pool,
                settings=connections,
                max_connections=chosen.max_connections,
                drain_timeout_s=0,  # clients stay connected for any time: waiting for them is pointless
            )
            async with volumes.running(), server:
                yield Serving(server.port, metrics, volumes, root / "owner.token")
