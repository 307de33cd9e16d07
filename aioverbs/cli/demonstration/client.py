"""A client's process: it does what it is told on its standard input, and tells what comes of it on the other one.

    python -m aioverbs.cli.demonstration.client PARENT ASSIGNMENT

Orders and answers are lines, answers JSON: any number of ``{"progress": n}``, then ``{"done": …}`` or, at the end of
all, ``{"failed": why}``. The end of the standard input is an order to end.
"""

import asyncio
import json
import sys
import threading
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aioverbs._monitoring.jsonable import plain
from aioverbs._verbs.device import open_device
from aioverbs._verbs.resource_domain import ResourceDomain
from aioverbs.cli.common import runner
from aioverbs.cli.demonstration.data_set import data_files, end_of
from aioverbs.cli.demonstration.loading import Loading
from aioverbs.cli.demonstration.misuse import misuse
from aioverbs.cli.demonstration.storage import storage_server
from aioverbs.cli.demonstration.tethered import tether

if TYPE_CHECKING:
    from storage_server.client import Storage

__all__ = ["Assignment"]

_TRAY = 8 << 20  # the least; the largest file has to fit


@dataclass(frozen=True)
class Assignment:
    """What a client is to do.

    :param number: which of the clients it is.
    :param total: bytes of its files.
    :param folder: for them.
    :param token_file: what it proves who it is by.
    """

    number: int
    total: int
    seed: str
    folder: str
    host: str
    port: int
    token_file: str


def _say(**what: object) -> None:
    print(json.dumps(plain(what)), flush=True)


def _listen(loop: asyncio.AbstractEventLoop, orders: "asyncio.Queue[str]") -> None:
    """Pass orders on, in a thread, which the end of the process ends."""
    for line in sys.stdin:
        loop.call_soon_threadsafe(orders.put_nowait, line.strip())
    loop.call_soon_threadsafe(orders.put_nowait, "end")


class _Client:
    """It, at work."""

    def __init__(self, assignment: Assignment, domain: ResourceDomain, storage: "Storage", loading: Loading) -> None:
        self._assignment = assignment
        self._domain = domain
        self._storage = storage
        self._loading = loading
        self._volume = f"client-{assignment.number}"

    async def obey(self, order: str, argument: str) -> object:
        """Do it; what came of it."""
        match order:
            case "make":
                await asyncio.to_thread(self._loading.make)
                return None
            case "write":
                files = data_files(self._assignment.total, self._assignment.seed)
                await self._storage.create(self._volume, end_of(files))
                async with self._storage.open(self._volume, write=True) as volume:
                    return await self._loading.write(volume)
            case "read":
                async with self._storage.open(self._volume) as volume:
                    return await self._loading.read(volume)
            case "sample":
                async with self._storage.open(self._volume) as volume:
                    sampled = await self._loading.sample(volume, float(argument), self._assignment.seed)
                    return {"took_ns": sampled.took_ns.tolist(), "faults": sampled.faults}
            case "misuse":
                return await misuse(self._domain)
        raise ValueError(f"{order!r} is no order")


async def _work(assignment: Assignment, token: str, orders: "asyncio.Queue[str]") -> None:
    from storage_server.client import connect
    from storage_server.remote_volume import several

    files = data_files(assignment.total, assignment.seed)
    async with AsyncExitStack() as stack:
        device = await stack.enter_async_context(open_device())
        domain = await stack.enter_async_context(device.resource_domain())
        tray = await stack.enter_async_context(domain.register(max(_TRAY, *(file.room for file in files))))
        storage = await stack.enter_async_context(connect(assignment.host, assignment.port, token, domain=domain))
        loading = Loading(files, Path(assignment.folder), tray, several, lambda done: _say(progress=done))
        client = _Client(assignment, domain, storage, loading)
        _say(done="ready")
        while (order := await orders.get()) != "end":
            _say(done=await client.obey(*order.partition(" ")[::2]))
    _say(done="ended")


async def _main(assignment: Assignment, token: str) -> None:
    orders: asyncio.Queue[str] = asyncio.Queue()
    threading.Thread(target=_listen, args=(asyncio.get_running_loop(), orders), daemon=True).start()
    await _work(assignment, token, orders)


def main() -> int:
    """Work to the end."""
    tether(int(sys.argv[1]))
    told: dict[str, Any] = json.loads(sys.argv[2])
    sys.path.append(str(storage_server().parent))
    try:
        with runner() as loop:
            loop.run(_main(Assignment(**told), Path(told["token_file"]).read_text()))
    except Exception as error:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        _say(failed=f"{type(error).__name__}: {error}")
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
