"""The test-only library of `shim.h`, installed in a live context."""

import ctypes
import os

import pytest

from aioverbs._core.handles import handles, parent_domain

__all__ = ["CONTROL_PAGE", "Shim"]

CONTROL_PAGE = 1 << 32 | 1  # resource type that the shim requests from allocators
COUNTS = ("tds", "parents", "xrcds", "xrc_domains", "alloc_calls", "free_calls")


class Counts(ctypes.Structure):
    """``struct shim_counts``."""

    _fields_ = [(name, ctypes.c_uint32) for name in COUNTS]


class Shim:
    """The shim, installed in a context."""

    def __init__(self, context: handles.Context) -> None:
        path = os.environ.get("AIOVERBS_TEST_SHIM")
        if not path:
            pytest.fail("AIOVERBS_TEST_SHIM must name the shim's library: use `nox -s rdma`")
        self.library = ctypes.CDLL(path)
        verbs, slot = ctypes.c_void_p(context.extended_address), ctypes.c_void_p(context.table_slot("dealloc_pd"))
        assert self.library.shim_install(verbs, slot) == 0

    def counts(self) -> dict[str, int]:
        """Return the number of live objects, and of calls of allocators."""
        counts = Counts()
        self.library.shim_counts(ctypes.byref(counts))
        return {name: getattr(counts, name) for name in COUNTS}

    def associate(self, xrcd: parent_domain.XrcDomain, difference: int) -> None:
        """Change the number of queues associated with an XRC domain."""
        assert self.library.shim_associate(ctypes.c_void_p(xrcd.verbs_pointer), difference) == 0

    def alive(self) -> dict[str, int]:
        """Return the number of live objects, without zeros."""
        return {name: count for name, count in self.counts().items() if count and not name.endswith("calls")}

    def uninstall(self) -> None:
        """Uninstall the shim, and check that none of its objects is alive."""
        assert not self.alive()
        assert self.library.shim_uninstall() == 0
