"""A scheduler, or a nanny and its worker, in a process of its own, until that is killed or closed by the cluster.

    python tests/distributed/node.py scheduler
    python tests/distributed/node.py nanny ADDRESS

The process prints its address when it is ready.
"""

import asyncio
import sys
from typing import Any

from distributed import Nanny, Scheduler


async def main(kind: str, scheduler: str = "") -> None:
    """Run a node until it is closed.

    :param kind: ``"scheduler"`` or ``"nanny"``.
    :param scheduler: for a nanny, the address of its scheduler.
    """
    node: Any
    if kind == "scheduler":
        node = Scheduler(protocol="aioverbs://", host="127.0.0.1", port=0, dashboard_address=":0")
    else:
        node = Nanny(scheduler, nthreads=1, dashboard_address=":0")
    async with node:
        print(node.address, flush=True)
        await node.finished()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
