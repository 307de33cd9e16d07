"""Trial of `aioverbs doctor`: by which ways the software devices of two processes reach each other on this machine.

This module is also the program of the second process.
"""

import asyncio
import sys

from aioverbs._connection.connect import connect
from aioverbs._connection.connection import Connection
from aioverbs._server.server import serve
from aioverbs._verbs.device import open_device

__all__ = ["find_ways"]

_PROGRAM = "aioverbs.cli.local_peer"
_TRIAL_S = 20.0
_HOST = "127.0.0.1"


async def _send_over(port: int) -> dict[str, str | bool]:
    """Exchange messages with the second process, whose server listens at ``port``.

    :returns: what `find_ways` returns.
    :raises VerbsError: no resource can be created, or the second process cannot be reached.
    """
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        connect(_HOST, port, domain=domain) as connection,
    ):
        await connection.send(b"trial")
        await connection.receive()
        link = next(peer for peer in device.peers() if peer.connected_by_us and peer.connected)
        return {name: getattr(link, name) for name in ("rings", "why_not_rings", "direct", "why_not_direct")}


async def find_ways() -> dict[str, str | bool]:
    """Start a second process, and exchange messages with its software device.

    :returns: a dict with the keys ``rings``, ``why_not_rings``, ``direct`` and ``why_not_direct``, as in `Peer`.
    :raises OSError: the process cannot be started, or fails.
    :raises TimeoutError: the trial does not end in time.
    :raises VerbsError: no resource can be created, or the second process cannot be reached.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-m", _PROGRAM, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_TRIAL_S):
            port = await process.stdout.readline()
            if not port:
                raise ChildProcessError("the second process ended before it listened")
            return await _send_over(int(port))
    finally:
        process.stdin.close()
        await process.wait()


async def _echo(connection: Connection) -> None:
    await connection.send(await connection.receive())


async def _serve() -> None:
    """Serve connections until standard input ends."""
    async with (
        open_device("soft0") as device,
        device.resource_domain() as domain,
        serve(_echo, _HOST, domain=domain) as server,
    ):
        print(server.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve())
