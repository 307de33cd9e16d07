"""Peer process of `aioverbs bench`: receives requests as lines of JSON on its standard input and prints the answers.

The process ends at the end of its input, and therefore also when the process that started it dies.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aioverbs._verbs.completion_queue import MessageModel
from aioverbs.cli.bench_device import LOOPBACK, DeviceServer, device_server
from aioverbs.cli.bench_memory import Memory
from aioverbs.cli.bench_stream import READ_LIMIT, serve_stream
from aioverbs.cli.common import runner
from aioverbs.errors import DeviceNotFoundError

__all__ = ["main"]


@asynccontextmanager
async def _serve_tcp(memory: Memory, secret: bytes) -> AsyncIterator[int]:
    """Serve the memory over TCP on the loopback address and yield the port; close the server when the block ends.

    :raises OSError: the server cannot listen.
    """
    async with await asyncio.start_server(serve_stream(memory, secret), LOOPBACK, 0, limit=READ_LIMIT) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def _serve_unix(memory: Memory, secret: bytes, path: str) -> AsyncIterator[str]:
    """Serve the memory over a Unix socket at ``path`` and yield the path; close the server when the block ends.

    :raises OSError: the server cannot listen.
    """
    async with await asyncio.start_unix_server(serve_stream(memory, secret), path, limit=READ_LIMIT):
        yield path


class _Peer:
    """Servers and memories of all contenders."""

    def __init__(self) -> None:
        self._memories: dict[str, Memory] = {}
        self._servers: dict[str, DeviceServer] = {}

    async def serve(self, stack: AsyncExitStack, request: dict[str, Any]) -> dict[str, Any]:
        """Start the servers of both streams and of the requested devices.

        :param stack: exit stack that closes the servers.
        :param request: the first request, with ``secret``, ``model``, ``path`` and ``devices``.
        :returns: a dict with two dicts: ``addresses`` has the port or path of each stream and device by name, and
            ``problems`` has an error message for each device that cannot be served.
        :raises OSError: the server of a stream cannot listen.
        """
        secret, model = bytes.fromhex(request["secret"]), MessageModel[request["model"]]
        self._memories = {"tcp": Memory(), "unix": Memory()}
        addresses: dict[str, int | str] = {
            "tcp": await stack.enter_async_context(_serve_tcp(self._memories["tcp"], secret)),
            "unix": await stack.enter_async_context(_serve_unix(self._memories["unix"], secret, request["path"])),
        }
        problems = {}
        for name in request["devices"]:
            try:
                server = await stack.enter_async_context(device_server(name, model, secret))
            except (OSError, ValueError, DeviceNotFoundError) as error:
                problems[name] = str(error)
                continue
            self._servers[name], self._memories[name] = server, server.memory
            addresses[name] = server.port
        return {"addresses": addresses, "problems": problems}

    async def handle_turn(self, request: dict[str, Any]) -> dict[str, Any]:
        """Begin or end a turn of a device or stream.

        :param request: ``action`` (``"begin"`` or ``"end"``), ``name`` of the device or stream, ``size`` and ``slots``;
            to begin, also ``turn`` and ``operation``.
        :returns: at the beginning of a turn, an empty dict; at its end, a dict with the ``checksum`` of the incoming
            bytes.
        :raises ValueError: a message of the turn contains the number of a slot that the memory does not have.
        """
        name, size, slots = request["name"], request["size"], request["slots"]
        server = self._servers.get(name)
        if request["action"] == "begin":
            self._memories[name].prepare(size, slots, request["turn"])
            if server is not None:
                await server.start_turn(request["operation"])
            return {}
        if server is not None:
            await server.end_turn()
        return {"checksum": self._memories[name].checksum(size, slots)}


async def _requests() -> AsyncIterator[dict[str, Any]]:
    """Yield each request on standard input as a dict; end when the input ends.

    :raises ValueError: a line is not JSON, or is longer than 64 KiB.
    """
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


async def main() -> None:
    """Answer the requests on standard input until the input ends, then close all servers.

    :raises ValueError: a line of the input is not JSON, or a message contains the number of a slot that does not exist.
    :raises OSError: the server of a stream cannot listen, or the answers cannot be printed.
    """
    async with AsyncExitStack() as stack:
        peer = _Peer()
        serving = False
        async for request in _requests():
            answer = await peer.handle_turn(request) if serving else await peer.serve(stack, request)
            serving = True
            print(json.dumps({"number": request["number"], **answer}), flush=True)


if __name__ == "__main__":
    with runner() as loop:
        loop.run(main())
