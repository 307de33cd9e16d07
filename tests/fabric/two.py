"""A second process that runs `tests.fabric.peer`, and an end in this process that connects to it."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioverbs import (
    Device,
    Endpoint,
    MemoryRegion,
    MessageModel,
    QueuePair,
    RemoteRegion,
    ResourceDomain,
    open_device,
)
from tests.conftest import ROOT
from tests.data_path.ends import LONG_TIMEOUT
from tests.fabric.peer import ACCESS, SIZE
from tests.pace import patience

__all__ = ["End", "PeerProcess", "end", "peer_process"]

START = f"import sys, runpy; sys.path.append({str(ROOT)!r}); runpy.run_module('tests.fabric.peer', run_name='__main__')"


@dataclass
class PeerProcess:
    """The second process."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    region: RemoteRegion = field(init=False)

    async def command(self, line: str) -> str:
        self.writer.write(f"{line}\n".encode())
        answer = await asyncio.wait_for(self.reader.readline(), patience(20))
        assert answer, "the process ended"
        return answer.decode().strip()

    async def read_memory(self, at: int, length: int) -> bytes:
        return bytes.fromhex(await self.command(f"look {at} {length}"))

    async def connect(self, qp: QueuePair, **attributes: Any) -> Endpoint:
        """Connect both sides with these attributes, and with a long timeout unless one is given."""
        attributes = {**LONG_TIMEOUT, **attributes}
        arguments = " ".join(f"{name}={value}" for name, value in attributes.items())
        answer = await self.command(f"connect {bytes(qp.local_endpoint()).hex()} {arguments}")
        there = Endpoint.from_bytes(bytes.fromhex(answer))
        qp.connect(there, ACCESS, **attributes)
        return there

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)


@contextlib.asynccontextmanager
async def peer_process(
    model: MessageModel = MessageModel.DEFAULT,
    environment: Mapping[str, str] | None = None,
    *,
    prefix: Sequence[str] = (),
) -> AsyncIterator[PeerProcess]:
    """Start the second process, which ends when its socket is closed.

    :param environment: variables to set there in addition to those of this process; an empty value unsets one.
    :param prefix: the command that runs the process.
    """
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    with theirs:
        number = theirs.fileno()
        process = await asyncio.create_subprocess_exec(
            *(*prefix, sys.executable, "-P", "-c", START, str(number), model.name),
            pass_fds=[number],
            env={**os.environ, **(environment or {})},
        )
    peer = PeerProcess(process, reader, writer)
    try:
        address, rkey = (await peer.command("memory")).split()
        peer.region = RemoteRegion(int(address), SIZE, int(rkey))
        yield peer
    finally:
        writer.close()
        try:
            status = await asyncio.wait_for(process.wait(), patience(20))
        except TimeoutError:
            process.kill()
            raise
    assert status in (0, -signal.SIGKILL)


@dataclass
class End:
    device: Device
    domain: ResourceDomain
    region: MemoryRegion
    qps: list[QueuePair]


@contextlib.asynccontextmanager
async def end(
    model: MessageModel = MessageModel.DEFAULT, *, queue_pairs: int = 1, size: int = SIZE
) -> AsyncIterator[End]:
    async with contextlib.AsyncExitStack() as stack:
        opened = stack.enter_async_context
        device = await opened(open_device("soft0"))
        domain = await opened(device.resource_domain(message_model=model))
        region = await opened(domain.register(SIZE, ACCESS))
        cq = await opened(domain.completion_queue(1024))
        qps = [await opened(domain.queue_pair(cq)) for _ in range(queue_pairs)]
        yield End(device, domain, region, qps)
