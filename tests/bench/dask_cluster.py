"""Work of Dask clusters: two workers each, with this backend and with tcp, which take turns.

    python tests/bench/dask_cluster.py [--gib 1] [--rounds 9] [--tasks 10000] [--work shuffle ...]

Data is on the workers before the time begins. ``shuffle`` and ``rechunk`` move it by P2P, ``transpose`` adds an array
to its transpose, and ``tasks`` are as many calls of a function that does nothing, from the client.
"""

import argparse
import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import dask
import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster, wait

SCHEMES = ("aioverbs", "tcp")
_PARTS = 16


def _part(number: int, rows: int) -> pd.DataFrame:
    """Return a partition of a dataframe: 8 columns of 8 bytes, one of which is a random key."""
    chance = np.random.default_rng(number)
    columns = {f"value{each}": chance.random(rows) for each in range(7)}
    return pd.DataFrame({"key": chance.integers(0, 1 << 40, rows), **columns})


def _nothing(number: int) -> int:
    return number


async def _keep(client: Client, collection: Any) -> Any:
    """Compute a collection on the workers, and return it."""
    kept = client.persist(collection)
    await wait(kept)
    return kept


async def _shuffle(client: Client, frame: Any) -> None:
    await _keep(client, frame.shuffle("key", shuffle_method="p2p"))


async def _rechunk(client: Client, array: Any) -> None:
    side = array.shape[0]
    await _keep(client, array.rechunk((side, side // _PARTS + 1), method="p2p"))


async def _transpose(client: Client, array: Any) -> None:
    await _keep(client, array + array.T)


async def _tasks(client: Client, count: int) -> None:
    assert len(await client.gather(client.map(_nothing, range(count), pure=False))) == count


async def _works(client: Client, options: argparse.Namespace) -> dict[str, Callable[[], Awaitable[None]]]:
    """Return what is measured, with its data on the workers of a client."""
    size = int(options.gib * (1 << 30))
    side = int((size / 8) ** 0.5)
    works: dict[str, Callable[[], Awaitable[None]]] = {}
    if "shuffle" in options.work:
        rows = size // 64 // _PARTS
        frame = await _keep(client, dd.from_map(partial(_part, rows=rows), range(_PARTS), meta=_part(0, 1)))
        works["shuffle"] = partial(_shuffle, client, frame)
    if {"rechunk", "transpose"} & set(options.work):
        array = await _keep(client, da.random.random((side, side), chunks=(side // _PARTS + 1, side)))
        square = await _keep(client, array.rechunk((side // 4 + 1, side // 4 + 1)))
        works |= {"rechunk": partial(_rechunk, client, array), "transpose": partial(_transpose, client, square)}
    works["tasks"] = partial(_tasks, client, options.tasks)
    return {name: work for name, work in works.items() if name in options.work}


async def _measure(options: argparse.Namespace) -> None:
    """Measure and print all works."""
    async with AsyncExitStack() as stack:
        works = {}
        for scheme in SCHEMES:
            cluster = LocalCluster(
                n_workers=2, threads_per_worker=1, protocol=f"{scheme}://", dashboard_address=None, asynchronous=True
            )
            client = await stack.enter_async_context(
                Client(await stack.enter_async_context(cluster), asynchronous=True)
            )
            works[scheme] = await _works(client, options)
        for name in options.work:
            seconds: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
            for turn in range(options.rounds + 1):
                for scheme in SCHEMES:
                    gc.collect()
                    begin = time.perf_counter()
                    await works[scheme][name]()
                    if turn:  # the first one warms up
                        seconds[scheme].append(time.perf_counter() - begin)
                    await asyncio.sleep(0.3)  # for the release of what was computed
            ours, theirs = (np.array(seconds[scheme]) for scheme in SCHEMES)
            low, middle, high = np.percentile(theirs / ours, (25, 50, 75))
            print(
                f"{name:>10} aioverbs {np.median(ours):6.2f} s   tcp {np.median(theirs):6.2f} s   "
                f"{middle:.2f} times as fast ({low:.2f} to {high:.2f})",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = ("shuffle", "rechunk", "transpose", "tasks")
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of data")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each backend")
    parser.add_argument("--tasks", type=int, default=10_000, help="number of tasks")
    parser.add_argument("--work", action="append", choices=names, help="one of several; all without")
    options = parser.parse_args()
    options.work = options.work or list(names)
    with dask.config.set({"distributed.admin.log-length": 0}):
        asyncio.run(_measure(options))


if __name__ == "__main__":
    main()
