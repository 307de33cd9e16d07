"""A process that uses the libraries of RDMA devices and prints what came of it, as JSON.

It is one of its own since a library that does not fit may end it.
"""

import asyncio
import ctypes
import json
import logging
import re
import sys
from pathlib import Path

from aioverbs._core.handles.handles import is_optimized
from aioverbs._verbs.device import open_device
from aioverbs.attributes import QpCapabilities

_DEPTH = 16
_MEMORY = 64 << 10


def _library(name: str) -> dict[str, str | None]:
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return {"problem": str(error)}
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    stem = name.partition(".so")[0]
    path = next((each for each in sorted(mapped) if Path(each).name.startswith(f"{stem}.so")), None)
    version = re.search(r"\.so\.\d+\.\d+\.(.+)$", path or "")  # the interface's, then that of rdma-core
    return {"path": path, "version": version[1] if version else None}


def _pyverbs() -> dict[str, str | None]:
    try:
        import pyverbs.device
    except ImportError as error:
        return {"problem": str(error)}
    return {"path": str(Path(pyverbs.device.__file__ or "").parent)}


def _listed() -> list[str]:
    """The devices that libibverbs finds, whether or not pyverbs is there."""
    verbs = ctypes.CDLL("libibverbs.so.1")
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    count = ctypes.c_int()
    devices = verbs.ibv_get_device_list(ctypes.byref(count))
    if not devices:
        return []
    names = [verbs.ibv_get_device_name(ctypes.c_void_p(devices[index])).decode() for index in range(count.value)]
    verbs.ibv_free_device_list(devices)
    return names


async def _use(name: str) -> None:
    """Make what every user makes."""
    async with (
        open_device(name) as device,
        device.resource_domain() as domain,
        domain.register(_MEMORY),
        domain.completion_queue(2 * _DEPTH) as cq,
        domain.queue_pair(cq, capabilities=QpCapabilities(max_send_wr=_DEPTH, max_recv_wr=_DEPTH)),
    ):
        pass


def _try(name: str) -> dict[str, str | int]:
    try:
        asyncio.run(_use(name))
    except Exception as error:  # whatever it is, it is what was asked for
        return {"problem": str(error), "number": getattr(error, "errno", None) or 0}
    return {}


def main() -> None:
    """Print what is found."""
    logging.getLogger("aioverbs").setLevel(logging.ERROR)  # which domains are native is nobody's trouble
    libraries = {name: _library(f"{name}.so.1") for name in ("libibverbs", "librdmacm")}
    pyverbs = _pyverbs()
    listed = [] if "problem" in libraries["libibverbs"] else _listed()
    trials = {} if "problem" in pyverbs else {name: _try(name) for name in listed}
    found = {**libraries, "pyverbs": pyverbs, "listed": listed, "trials": trials, "optimized": is_optimized()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
