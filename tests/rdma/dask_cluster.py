"""A Dask cluster on this machine that rechunks an array; the settings of Dask come from the environment.

python tests/rdma/dask_cluster.py "processes" | "threads" [HOST]

The process prints an object of JSON: see `main`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client, LocalCluster

SIDE = 1000


def devices_of_queue_pairs(pids: Mapping[str, int]) -> dict[str, list[str]]:
    """Return the names of the devices on which processes have queue pairs, from the kernel.

    :param pids: IDs of the processes, by any name.
    """
    shown = subprocess.run(["rdma", "-j", "resource", "show", "qp"], check=True, capture_output=True, timeout=60)
    # The kernel reports the thread that made a queue pair, and none for its own ones.
    made = [(qp.get("pid"), qp["ifname"]) for qp in json.loads(shown.stdout)]
    threads = {name: {int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()} for name, pid in pids.items()}
    return {name: sorted({device for thread, device in made if thread in ids}) for name, ids in threads.items()}


def main(processes: bool, host: str | None) -> dict[str, Any]:
    """Rechunk an array from rows to columns, on two workers.

    :param processes: whether the workers are processes of their own, instead of threads.
    :param host: address at which all listen; None for the loopback address.
    :returns: ``"correct"``, whether the result is; ``"size"`` of the result in bytes, which the client receives;
        ``"moved"``, how many bytes the workers received from each other; ``"devices"`` of the queue pairs of each
        process, by ``"scheduler"`` and the addresses of the workers.
    """
    with (
        LocalCluster(
            protocol="aioverbs://",
            host=host,
            n_workers=2,
            threads_per_worker=1,
            processes=processes,
            dashboard_address=":0",
            worker_dashboard_address=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        rows = da.fromfunction(lambda i, k: i * SIDE + k, shape=(SIDE, SIDE), chunks=(SIDE // 4, SIDE), dtype="int64")
        result = rows.rechunk((SIDE, SIDE // 4)).compute()
        received = client.run(lambda dask_worker: sum(each["total"] for each in dask_worker.transfer_incoming_log))
        pids = {"scheduler": os.getpid(), **client.run(os.getpid)}
        return {
            "correct": np.array_equal(result, np.arange(SIDE * SIDE).reshape((SIDE, SIDE))),
            "size": result.nbytes,
            "moved": sum(received.values()),
            "devices": devices_of_queue_pairs(pids),
        }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1] == "processes", sys.argv[2] if len(sys.argv) > 2 else None)))
