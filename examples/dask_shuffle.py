"""Dask over RDMA: a cluster on this machine rechunks an array and shuffles a dataframe, and checks the results.

    pip install "aioverbs[distributed]" "dask[array,dataframe]"
    python examples/dask_shuffle.py

The workers use this machine's RDMA device, or the software device if there is none.
"""

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client, LocalCluster


def check_array(side: int = 2000) -> None:
    """Add an array in chunks of rows to its transpose, and compare the result with that of numpy."""
    rows = da.fromfunction(lambda i, k: i * side + k, shape=(side, side), chunks=(side // 4, side), dtype="int64")
    total = (rows + rows.T.rechunk(rows.chunks)).compute()
    numbers = np.arange(side * side).reshape((side, side))
    np.testing.assert_array_equal(total, numbers + numbers.T)
    print(f"array of {total.nbytes:,} bytes: correct")


def check_dataframe(n_rows: int = 400_000) -> None:
    """Shuffle a dataframe by a column, so that rows with equal keys are in one partition, and check keys and sum."""
    values = da.arange(n_rows, chunks=n_rows // 8)
    frame = dd.from_dask_array(da.stack([values % 97, values], axis=1), columns=["key", "value"])
    shuffled = frame.shuffle("key", shuffle_method="p2p")
    keys = shuffled.map_partitions(lambda part: pd.Series([part["key"].nunique()]), meta=pd.Series(dtype="int64"))
    assert int(keys.sum().compute()) == 97, "a key is in more than one partition"
    assert int(shuffled["value"].sum().compute()) == n_rows * (n_rows - 1) // 2
    print(f"dataframe of {n_rows:,} rows: correct")


def main() -> None:
    with (
        LocalCluster(protocol="aioverbs://", n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        print(f"scheduler at {client.scheduler.address}, workers at {', '.join(client.scheduler_info()['workers'])}")
        check_array()
        check_dataframe()


if __name__ == "__main__":
    main()
