"""The other process of `aioverbs bench`: what it is told comes as lines of JSON, and so does what it answers.

It ends when its input does, as it does when the first process dies.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aioverbs._verbs.completion_queue import MessageModel
from aioverbs.cli.bench_device import HERE, DeviceServer, device_server
from aioverbs.cli.bench_memory import Memory
from aioverbs.cli.bench_stream import LIMIT, serve_stream
from aioverbs.cli.common import runner
from aioverbs.errors import DeviceNotFoundError

__all__ = ["main"]


@asynccontextmanager
async def _tcp(memory: Memory, secret: bytes) -> AsyncIterator[int]:
    async with await asyncio.start_server(serve_stream(memory, secret), HERE, 0, limit=LIMIT) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def _unix(memory: Memory, secret: bytes, path: str) -> AsyncIterator[str]:
    async with await asyncio.start_unix_server(serve_stream(memory, secret), path, limit=LIMIT):
        yield path


class _Peer:
    """All that it serves."""

    def __init__(self) -> None:
        self._memories: dict[str, Memory] = {}
        self._servers: dict[str, DeviceServer] = {}

    async def serve(self, stack: AsyncExitStack, told: dict[str, Any]) -> dict[str, Any]:
        """Serve streams and devices; where they are, and why some are not."""
        secret, model = bytes.fromhex(told["secret"]), MessageModel[told["model"]]
        self._memories = {"tcp": Memory(), "unix": Memory()}
        places: dict[str, int | str] = {
            "tcp": await stack.enter_async_context(_tcp(self._memories["tcp"], secret)),
            "unix": await stack.enter_async_context(_unix(self._memories["unix"], secret, told["path"])),
        }
        problems = {}
        for name in told["devices"]:
            try:
                server = await stack.enter_async_context(device_server(name, model, secret))
            except (OSError, ValueError, DeviceNotFoundError) as error:
                problems[name] = str(error)
                continue
            self._servers[name], self._memories[name] = server, server.memory
            places[name] = server.port
        return {"places": places, "problems": problems}

    async def turn(self, told: dict[str, Any]) -> dict[str, Any]:
        """A turn begins, or is over: then the checksum of what came."""
        name, size, places = told["name"], told["size"], told["places"]
        server = self._servers.get(name)
        if told["what"] == "begin":
            self._memories[name].begin(size, places, told["turn"])
            if server is not None:
                await server.begin(told["operation"])
            return {}
        if server is not None:
            await server.end()
        return {"checksum": self._memories[name].checksum(size, places)}


async def _lines() -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


async def main() -> None:
    """Serve until the input ends."""
    async with AsyncExitStack() as stack:
        peer = _Peer()
        serving = False
        async for told in _lines():
            answer = await peer.turn(told) if serving else await peer.serve(stack, told)
            serving = True
            print(json.dumps({"number": told["number"], **answer}), flush=True)


if __name__ == "__main__":
    with runner() as loop:
        loop.run(main())
