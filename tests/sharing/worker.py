"""Worker process with an instance of a protection domain, its own or an imported one, controlled by lines of text.

Arguments are the descriptors of two sockets: a listening one, to which the controlling test has connected and on which
one line answers each command, and one over which the domain is sent or received.
"""

import asyncio
import contextlib
import os
import socket
import sys
import time
import warnings
from typing import Any

from aioverbs import (
    AccessFlags,
    CompletionQueue,
    Device,
    Endpoint,
    MemoryRegion,
    ProtectionDomain,
    QueuePair,
    RemoteRegion,
    ResourceDomain,
    SharedProtectionDomain,
    VerbsError,
    WorkCompletionError,
    import_device,
    open_device,
)
from aioverbs._core.software.software import export

ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
LONG_TIMEOUT: dict[str, Any] = {"timeout": 17, "rnr_retry": 7}  # seven retries of 0.5 s; unlimited RNR retries


class Worker:
    """Resources of this process, and the commands on them."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.stack = contextlib.AsyncExitStack()
        self.device: Device
        self.pd: ProtectionDomain
        self.shared: SharedProtectionDomain
        self.domain: ResourceDomain | None = None
        self.cq: CompletionQueue
        self.regions: dict[str, MemoryRegion] = {}
        self.qps: list[QueuePair] = []

    async def queue_pair(self) -> QueuePair:
        if self.domain is None:
            self.domain = await self.device.resource_domain(self.pd).open()
            self.cq = await self.domain.completion_queue(4096).open()
        qp = await self.domain.queue_pair(self.cq).open()
        self.qps.append(qp)
        return qp

    async def close_domain(self) -> None:
        for qp in self.qps:
            await qp.aclose()
        self.qps.clear()
        if self.domain is not None:
            await self.cq.aclose()
            await self.domain.aclose()
        self.domain = None

    async def close_all(self) -> None:
        """Close all resources, so that the next test starts without any."""
        await self.close_domain()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # about children that the device closes
            if hasattr(self, "device"):
                await self.device.aclose()
        self.regions.clear()

    async def run_command(self, command: list[str]) -> str:
        match command:
            case ["begin", directory, direct]:
                os.environ.update(AIOVERBS_SOFT_DIRECTORY=directory, AIOVERBS_SOFT_DIRECT=direct)
            case ["share", key]:
                self.device = await open_device("soft0").open()
                self.pd = await self.device.protection_domain().open()
                self.shared = await self.pd.share(int(key)).open()
                return str(self.shared.id)
            case ["send"]:
                await self.shared.send(self.sock)
            case ["import", shared_id, key]:
                self.device = await import_device(self.sock, int(shared_id), int(key)).open()
                return self.device.name
            case ["instance", shared_id, key]:
                self.pd = await self.device.shared_protection_domain(int(shared_id), int(key)).open()
            case ["register", name, size]:
                region = await self.pd.register(int(size), ACCESS, self.pd.shared_memory).open()
                self.regions[name] = region
                region.buffer[:] = name.encode()[:1] * int(size)
                return bytes(region.remote()).hex()
            case ["private", name, size]:
                self.regions[name] = region = await self.pd.register(int(size), ACCESS).open()
                return bytes(region.remote()).hex()
            case ["borrow", name, key]:
                self.regions[name] = await self.pd.import_memory_region(int(key)).open()
            case ["look", name, at, length]:
                return bytes(self.regions[name].buffer[int(at) : int(at) + int(length)]).hex()
            case ["put", name, at, data]:
                content = bytes.fromhex(data)
                self.regions[name].buffer[int(at) : int(at) + len(content)] = content
            case ["connect", endpoint]:
                qp = await self.queue_pair()
                qp.connect(Endpoint.from_bytes(bytes.fromhex(endpoint)), ACCESS, **LONG_TIMEOUT)
                return bytes(qp.local_endpoint()).hex()
            case ["send_from" | "write_from" | "read_to" as what, name, at, length, *remote]:
                local = self.regions[name][int(at) : int(at) + int(length)]
                if what == "send_from":
                    await self.qps[-1].send(local)
                elif what == "write_from":
                    await self.qps[-1].write(local, RemoteRegion.from_bytes(bytes.fromhex(remote[0])))
                else:
                    await self.qps[-1].read(local, RemoteRegion.from_bytes(bytes.fromhex(remote[0])))
            case ["receive_to", name, at, length]:
                received = await self.qps[-1].receive(self.regions[name][int(at) : int(at) + int(length)])
                return str(received.byte_len)
            case ["close", "domain"]:
                await self.close_domain()
            case ["close", "pd"]:
                await self.pd.aclose()
            case ["close", "device"]:
                await self.device.aclose()
            case ["close", "all"]:
                await self.close_all()
            case ["close", name]:
                await self.regions.pop(name).aclose()
            case ["blocks"]:
                return str(sum(os.stat(f"/proc/self/fd/{each}").st_blocks * 512 for each in descriptors()))
            case ["reap"]:
                os.close(export(self.pd.handle))
            case ["fork"]:
                fork_child()
            case ["leftovers"]:
                return " ".join(leftovers()) or "nothing"
            case _:
                raise ValueError(command)
        return "done"


def fork_child() -> None:
    """Fork a child that holds the inherited descriptors and mappings for two seconds."""
    if not os.fork():
        time.sleep(2)
        os._exit(0)


def descriptors() -> list[str]:
    """Return the open descriptors of files of shared domains."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "aioverbs-domain" in os.readlink(f"/proc/self/fd/{each}"):
                found.append(each)
    return found


def leftovers() -> list[str]:
    """Return open descriptors and mappings of files of shared domains."""
    found = [f"descriptor:{each}" for each in descriptors()]
    with open("/proc/self/maps") as maps:
        found += [f"mapping:{line.split()[0]}" for line in maps if "aioverbs-domain" in line]
    return found


async def main(listening: socket.socket, sock: socket.socket) -> None:
    sock.setblocking(False)
    with listening:
        commands, _ = listening.accept()
    reader, writer = await asyncio.open_connection(sock=commands, limit=1 << 22)
    worker = Worker(sock)
    while command := (await reader.readline()).decode().split():
        try:
            answer = await worker.run_command(command)
        except VerbsError as error:
            answer = f"! {error}"
        except WorkCompletionError as error:
            answer = f"! {error.status.name}"
        writer.write(f"{answer}\n".encode())
    writer.close()


if __name__ == "__main__":
    asyncio.run(main(*(socket.socket(fileno=int(each)) for each in sys.argv[1:3])))
