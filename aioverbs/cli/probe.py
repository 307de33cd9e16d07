"""Probe process of `aioverbs doctor`: uses the libraries of RDMA devices and the software device, and prints results.

The probe is a separate process because a library that does not match the others can crash its process.
"""

import asyncio
import ctypes
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import TextIO

from aioverbs._core.handles.handles import is_optimized
from aioverbs._core.handles.rdma_cm import load_librdmacm
from aioverbs._providers import hardware
from aioverbs._verbs.device import open_device
from aioverbs.attributes import QpCapabilities
from aioverbs.cli.local_peer import find_ways
from aioverbs.errors import LibraryNotFoundError, VerbsError

_DEPTH = 16
_MEMORY = 64 << 10


def _library(name: str) -> dict[str, str | bool | None]:
    """Load the library with the file name ``name``, such as ``"libibverbs.so.1"``.

    :returns: a dict with the keys ``path`` and ``version``, whose values are None if unknown. If the library cannot be
        loaded, the dict has only the key ``problem``, with the loader's error message.
    """
    try:
        ctypes.CDLL(name)
    except OSError as error:
        return {"problem": str(error)}
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    stem = name.partition(".so")[0]
    path = next((each for each in sorted(mapped) if Path(each).name.startswith(f"{stem}.so")), None)
    version = re.search(r"\.so\.\d+\.\d+\.(.+)$", path or "")  # after .so: the ABI version, then rdma-core's version
    return {"path": path, "version": version[1] if version else None}


async def _use(name: str) -> None:
    """Open the device ``name``, create the resources that every program needs (memory region, completion queue, queue
    pair) and close them.

    :raises DeviceNotFoundError: there is no device with that name.
    :raises VerbsError: the device cannot be opened, or one of the resources cannot be created or closed.
    """
    async with (
        open_device(name) as device,
        device.resource_domain() as domain,
        domain.register(_MEMORY),
        domain.completion_queue(2 * _DEPTH) as cq,
        domain.queue_pair(cq, capabilities=QpCapabilities(max_send_wr=_DEPTH, max_recv_wr=_DEPTH)),
    ):
        pass


def _try(name: str) -> dict[str, str | int]:
    """Test whether the device ``name`` can be used.

    :returns: an empty dict if it can. If `_use` raises any `Exception`, a dict with the keys ``problem``, its message,
        and ``number``, its errno, or 0 if it has none.
    """
    try:
        asyncio.run(_use(name))
    except Exception as error:  # every error is a result of the probe
        return {"problem": str(error), "number": getattr(error, "errno", None) or 0}
    return {}


def _ways() -> dict[str, str | bool]:
    """Test how the software device reaches another process.

    :returns: what `find_ways` returns. If it raises any `Exception`, a dict with the key ``problem``, its message.
    """
    try:
        return asyncio.run(find_ways())
    except Exception as error:  # every error is a result of the probe
        return {"problem": str(error) or type(error).__name__}


def main(out: TextIO) -> None:
    """Test the libraries and the devices, then write the results as one JSON object.

    :param out: file to write to.
    :raises OSError: the file cannot be written.
    """
    logging.getLogger("aioverbs").setLevel(logging.ERROR)  # warnings about emulated domains are not a result
    libraries = {name: _library(f"{name}.so.1") for name in ("libibverbs", "librdmacm")}
    listed: list[str] = []
    list_problem: str | None = None
    if "problem" not in libraries["libibverbs"]:
        try:
            listed = hardware.listed()
        except LibraryNotFoundError as error:
            libraries["libibverbs"] |= {"problem": error.reason, "outdated": error.outdated}
        except VerbsError as error:
            list_problem = str(error)
    if "problem" not in libraries["librdmacm"]:
        try:
            load_librdmacm()
        except LibraryNotFoundError as error:
            libraries["librdmacm"] |= {"problem": error.reason, "outdated": error.outdated}
    trials = {name: _try(name) for name in listed}
    found = {**libraries, "listed": listed, "trials": trials, "optimized": is_optimized()}
    found |= {"list_problem": list_problem, "ways": _ways()}
    json.dump(found, out)


if __name__ == "__main__":
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where lines go that a library prints
        main(out)
