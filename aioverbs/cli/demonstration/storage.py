"""The storage server of examples/storage_server: where it lies, starting it, and what it counts."""

import asyncio
import contextlib
import importlib.util
import os
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from aioverbs.cli.demonstration.children import Child, child

__all__ = ["Counts", "NotInstalledError", "Storage", "check_installed", "serving", "storage_server"]

_PACKAGE = Path(__file__).parents[2]
_METRICS_S = 10.0


class NotInstalledError(OSError):
    """Something is not installed that the demonstration needs."""


def storage_server(package: Path = _PACKAGE) -> Path:
    """The folder of the storage server: a part of what was installed, or the tree's.

    :param package: where aioverbs is.
    :raises NotInstalledError: there is none.
    """
    for folder in (package / "_examples" / "storage_server", package.parent / "examples" / "storage_server"):
        if (folder / "__main__.py").is_file():
            return folder
    raise NotInstalledError(f"the storage server is not where aioverbs is, {package}: install aioverbs again")


def check_installed() -> None:
    """See that all is there.

    :raises NotInstalledError: something is not.
    """
    storage_server()
    if importlib.util.find_spec("prometheus_client") is None:
        raise NotInstalledError(
            "the storage server counts by prometheus-client, which is not installed: `pip install prometheus-client`,"
            " or `pip install 'aioverbs[demo]'`"
        )


@dataclass(frozen=True)
class Counts:
    """What the server counted.

    :param flushes: that clients asked for and were answered.
    :param syncs: of the disk, each for one of them or more.
    :param sync_mean_s: how long one of these took.
    :param message_bytes: that went by messages, and not one-sidedly.
    """

    flushes: int
    syncs: int
    sync_mean_s: float
    message_bytes: int


@dataclass(frozen=True)
class Storage:
    """The server, running.

    :param token_file: what its clients prove who they are by.
    :param metrics: where it tells what it counts.
    """

    child: Child
    host: str
    port: int
    token_file: Path
    metrics: str

    async def counts(self) -> Counts:
        """Ask it what it counted."""
        return parse_counts(await asyncio.to_thread(_get, self.metrics))


@contextlib.asynccontextmanager
async def serving(
    folder: Path, device: str, monitor: Path, *, workers: int, loop: str, memory: int
) -> AsyncIterator[Storage]:
    """A server in a process of its own, for the time of the block.

    :param folder: for its volumes and what it complains of.
    :param device: its device's name.
    :param monitor: the directory of its socket for those who watch it.
    :param workers: loops, with a thread each.
    :param loop: ``"asyncio"`` or ``"uvloop"``.
    :param memory: bytes of its caches, where its device needs caches.
    :raises ChildEndedError: it does not start.
    """
    root = folder / "volumes"
    options = ["--port", "0", "--metrics-port", "0", "--workers", f"{workers}", "--loop", loop, "--memory", f"{memory}"]
    arguments = ["-m", "aioverbs.cli.demonstration.tethered", f"{os.getpid()}", f"{storage_server()}", "serve"]
    environment = {
        "AIOVERBS_DEVICE": device,
        "AIOVERBS_MONITOR": "1",
        "AIOVERBS_MONITOR_DIRECTORY": str(monitor),
    }
    async with child("the storage server", [*arguments, *options, str(root)], folder, environment) as process:
        metrics = (await process.line()).split()[-1]
        host, _, port = (await process.line()).rpartition(" at ")[2].rpartition(":")
        yield Storage(process, host, int(port), root / "owner.token", metrics)


def _get(url: str) -> str:
    here = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever the environment says of proxies
    with here.open(url, timeout=_METRICS_S) as answer:
        text: str = answer.read().decode()
    return text


def parse_counts(text: str) -> Counts:
    """What there is to tell of metrics in Prometheus' text form."""
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels in ({}, {"kind": "flush", "outcome": "done"}):
                values[sample.name] = sample.value
    syncs = round(values.get("storage_sync_seconds_count", 0))
    return Counts(
        round(values.get("storage_requests_total", 0)),
        syncs,
        values.get("storage_sync_seconds_sum", 0.0) / syncs if syncs else 0.0,
        round(values["storage_message_read_bytes_total"] + values["storage_message_written_bytes_total"]),
    )
