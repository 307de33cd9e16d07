"""One process that serves many others through the software fabric: fairness, and cost in memory."""

import asyncio
import json
import sys
from asyncio.subprocess import Process
from contextlib import AsyncExitStack
from pathlib import Path

from aioverbs import AccessFlags, Endpoint, QpCapabilities, open_device
from tests.bench.measuring import Limit, Result, percentile
from tests.bench.turns import line_of, running

__all__ = ["many_clients"]

HERE = Path(__file__).resolve().parent
CLIENTS, QUEUE_PAIRS, LENGTH = 64, 4, 4096
ACCESS = AccessFlags.LOCAL_WRITE | AccessFlags.REMOTE_WRITE


def _anonymous_kib() -> int:
    """Return the anonymous memory of this process in KiB."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/smaps_rollup has no line Anonymous")


def _send_line(process: Process, line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n".encode())


async def many_clients(seconds: float) -> Result:
    """Measure 4 KiB writes by 64 processes with 4 queue pairs each; each queue pair awaits a write before the next."""
    command = (sys.executable, "-P", str(HERE / "fabric_client.py"), str(QUEUE_PAIRS), str(LENGTH), str(seconds))
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        domain.register(LENGTH, ACCESS) as region,
        domain.completion_queue(2 * CLIENTS * QUEUE_PAIRS) as cq,
        AsyncExitStack() as stack,
    ):
        clients = [await stack.enter_async_context(running(*command)) for _ in range(CLIENTS)]
        description = [json.loads(await line_of(client)) for client in clients]
        before = _anonymous_kib()
        for client, endpoints in zip(clients, description, strict=True):
            endpoints_here = []
            for endpoint in endpoints:
                capabilities = QpCapabilities(max_send_wr=1, max_recv_wr=1)
                qp = await stack.enter_async_context(domain.queue_pair(cq, capabilities=capabilities))
                qp.connect(Endpoint.from_bytes(bytes.fromhex(endpoint)), ACCESS)
                endpoints_here.append(bytes(qp.local_endpoint()).hex())
            _send_line(
                client, json.dumps({"endpoints": endpoints_here, "address": region.address, "rkey": region.rkey})
            )
        await asyncio.gather(*map(line_of, clients))
        for client in clients:
            _send_line(client, "begin")
        counts = [list(map(int, line.split())) for line in await asyncio.gather(*map(line_of, clients))]
        cost = (_anonymous_kib() - before) / CLIENTS
        for client in clients:
            _send_line(client, "end")
        await asyncio.gather(*(client.wait() for client in clients))
    each = sorted(float(count) for line in counts for count in line)
    apart = [min(line) / max(line) for line in counts]
    figures = {
        "per_s": sum(each) / seconds,
        "slowest_to_median": each[0] / percentile(each, 50),
        "fastest_to_median": each[-1] / percentile(each, 50),
        "slowest_to_fastest_of_a_process": min(apart),
        "kib_per_client": cost,
    }
    return Result("fabric_64_clients", figures, {"slowest_to_median": Limit(at_least=0.5)})
