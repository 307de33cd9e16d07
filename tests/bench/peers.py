"""Peer processes of benchmarks: scripts that print a line when they are ready, and another for each line they read."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

__all__ = ["HOST", "PeerProcess", "peer_process", "standard_input"]

HOST = "127.0.0.1"


async def standard_input() -> asyncio.StreamReader:
    """Return the standard input as a stream."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


@dataclass
class PeerProcess:
    """A running script, and the last line that it has printed."""

    process: asyncio.subprocess.Process
    last_line: str = ""

    async def request(self, line: str) -> None:
        """Send a line, and wait for the one that the script prints."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.receive_line()

    async def receive_line(self) -> None:
        assert self.process.stdout is not None
        self.last_line = (await self.process.stdout.readline()).decode()


@contextlib.asynccontextmanager
async def peer_process(script: str, *arguments: str) -> AsyncIterator[PeerProcess]:
    """Run a script until the end of the block, which ends its standard input. The block begins with its first line."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, script, *arguments, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    peer = PeerProcess(process)
    try:
        await peer.receive_line()
        yield peer
    finally:
        process.stdin.close()
        await process.wait()
