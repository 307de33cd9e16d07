"""Comm backend for Dask's `distributed`: workers, schedulers and clients exchange messages over RDMA connections.

Install ``aioverbs[distributed]`` and use the protocol ``aioverbs``, as in ``LocalCluster(protocol="aioverbs://")``;
`distributed` finds the backend by its entry point. `configuration` describes the settings in `dask.config`.
"""

from aioverbs.distributed.backend import AioverbsBackend
from aioverbs.distributed.comm import AioverbsComm
from aioverbs.distributed.connector import AioverbsConnector
from aioverbs.distributed.listener import AioverbsListener

__all__ = ["AioverbsBackend", "AioverbsComm", "AioverbsConnector", "AioverbsListener"]

for _each in (AioverbsBackend, AioverbsComm, AioverbsConnector, AioverbsListener):
    _each.__module__ = __name__  # importing the defining module imports this one first
