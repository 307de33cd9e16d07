"""Probe process of `aioverbs doctor`: uses the libraries of RDMA devices, and prints the results as JSON.

The probe is a separate process because a library that does not match the others can crash its process.
"""

import asyncio
import ctypes
import json
import logging
import re
import sys
from pathlib import Path

from aioverbs._core.handles.handles import is_optimized
from aioverbs._providers import hardware
from aioverbs._verbs.device import open_device
from aioverbs.attributes import QpCapabilities
from aioverbs.errors import LibraryNotFoundError

_DEPTH = 16
_MEMORY = 64 << 10


def _library(name: str) -> dict[str, str | None]:
    """Load a library.

    :returns: ``problem`` if that fails; else ``path`` and ``version``, None where unknown.
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
    """Create and close the resources that every program needs.

    :raises VerbsError: one of them cannot be created.
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
    """Use a device as every program does; return ``problem`` and ``number`` (errno or 0) of an error, or an empty
    dict.
    """
    try:
        asyncio.run(_use(name))
    except Exception as error:  # every error is a result of the probe
        return {"problem": str(error), "number": getattr(error, "errno", None) or 0}
    return {}


def main() -> None:
    """Test the libraries and devices, and print the results as a JSON object."""
    logging.getLogger("aioverbs").setLevel(logging.ERROR)  # warnings about emulated domains are no result
    libraries = {name: _library(f"{name}.so.1") for name in ("libibverbs", "librdmacm")}
    listed: list[str] = []
    if "problem" not in libraries["libibverbs"]:
        try:
            listed = hardware.names()
        except LibraryNotFoundError as error:  # an old one, which lacks a verb
            libraries["libibverbs"] = {"problem": error.reason}
    trials = {name: _try(name) for name in listed}
    found = {**libraries, "listed": listed, "trials": trials, "optimized": is_optimized()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
