"""The echo of `rdma_baseline.c` on a `Connection` of this library, with the same arguments.

    python rdma_connection.py ask|answer MODEL LENGTH WINDOW OPERATIONS GID_INDEX NEAR FAR

MODEL is the name of a message model. Each message is awaited when it is sent and when it is received.
"""

import asyncio
import sys
from functools import partial
from pathlib import Path

import uvloop

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for running this as a script

from aioverbs import Connection, ConnectionSettings, MessageModel, connect, listen, open_device
from aioverbs._connection.shared_queues import completion_queue_for
from tests.bench.peers import HOST
from tests.bench.rdma_library import exchange_lines, timed


async def ask(connection: Connection, message: bytes, window: int, operations: int) -> None:
    """Send messages, `window` of them in flight, and receive their echoes."""
    for _ in range(min(window, operations)):
        await connection.send(message)
    for left in range(operations, 0, -1):
        await connection.receive()
        if left > window:
            await connection.send(message)


async def answer(connection: Connection, operations: int) -> None:
    """Send messages back."""
    for _ in range(operations):
        await connection.send(await connection.receive())


def settings_for(window: int) -> ConnectionSettings:
    """Return settings with as many receives as the queue pairs of the other contenders: two for each message."""
    usual = ConnectionSettings()
    return ConnectionSettings(
        receive_depth=max(usual.receive_depth, 2 * window),
        send_buffers=max(usual.send_buffers, window),
        send_depth=max(usual.send_depth, 2 * window),
    )


async def echo(what: str, model: str, length: int, window: int, operations: int, device: str) -> None:
    settings = settings_for(window)
    async with (
        open_device(device) as opened,
        opened.resource_domain(message_model=MessageModel[model]) as domain,
    ):
        if what == "ask":
            port = int(exchange_lines("the client"))
            connection = await connect(HOST, port, domain=domain, transport="tcp", settings=settings)
        else:
            async with listen(HOST, domain=domain, transport="tcp", settings=settings) as listener:
                exchange_lines(str(listener.port))
                connection = await listener.accept()
        async with connection:
            cq = completion_queue_for(domain, settings)  # that of the connection, which has room for more
            work = partial(ask, connection, bytes(length), window) if what == "ask" else partial(answer, connection)
            exchange_lines("ready")
            result = await timed(work, cq, operations)
            await asyncio.sleep(0)  # messages that share a frame leave at the end of the turn
            exchange_lines("done")
    print(result)


if __name__ == "__main__":
    what, model, *numbers, near, _ = sys.argv[1:]
    length, window, operations, _gid_index = map(int, numbers)
    uvloop.run(echo(what, model, length, window, operations, near))
