"""Use an installed aioverbs in an environment without extras: connect, exchange data, and look for the command."""

import asyncio
import os
import platform
import subprocess
import sys
import sysconfig

import aioverbs
from aioverbs._core.handles.handles import is_optimized
from aioverbs.attributes import Execution

SIZES = (0, 64, 3 << 20)


async def echo(connection: aioverbs.Connection) -> None:
    async for message in connection:
        await connection.send(message)


async def exchange(execution: Execution) -> None:
    """Send messages through the software device and back, and compare."""
    async with (
        aioverbs.open_device("soft0", execution=execution) as device,
        device.resource_domain() as domain,
        aioverbs.serve(echo, "127.0.0.1", domain=domain) as server,
        aioverbs.connect("127.0.0.1", server.port, domain=domain) as connection,
    ):
        for size in SIZES:
            sent = os.urandom(size)
            await connection.send(sent)
            assert await connection.receive() == sent, size


def main() -> None:
    assert aioverbs.__file__.startswith(sysconfig.get_path("platlib")), aioverbs.__file__
    assert is_optimized()
    asyncio.run(exchange("inline"))
    asyncio.run(exchange("thread"))
    command = (sys.executable, "-P", "-m", "aioverbs.cli")
    error = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False).stderr
    assert error == "aioverbs: the command needs click and rich: pip install 'aioverbs[cli]'\n", error
    python = f"{platform.python_implementation()} {platform.python_version()}"
    print(f"aioverbs {aioverbs.__version__} works with {python} for {platform.machine()}")


if __name__ == "__main__":
    main()
