"""Lookup of keys: regions for their owners, regions and windows for peers; binding and unbinding of windows."""

from collections import Counter
from dataclasses import dataclass, field

from aioverbs import AccessFlags
from tests.core.model import Pd, Region, Sge, Window
from tests.core.model_queue_pairs import Bind, Qp

REMOTE_ACCESS = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC
CHANGING = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC


@dataclass
class Memory:
    """All regions and windows of the device. The low byte of a key is not part of its index."""

    keys: dict[int, Region | Window] = field(default_factory=dict)
    coverage: Counter[str] = field(default_factory=Counter)  # counts of covered cases, asserted by the test

    def add(self, node: Region | Window, key: int) -> None:
        assert key >> 8 not in self.keys
        self.keys[key >> 8] = node

    def remove(self, node: Region | Window) -> None:
        del self.keys[node.key >> 8]

    def _window(self, key: int) -> Window | None:
        node = self.keys.get(key >> 8)
        return node if isinstance(node, Window) else None

    def find(self, pd: Pd, sge: Sge, access: AccessFlags) -> memoryview | None:
        """Return the memory of a region that a key gives local access to."""
        address, length, key = sge
        region = self.keys.get(key >> 8)
        if not isinstance(region, Region) or region.key != key:
            return None
        if region.pd.root is not pd.root or region.access & access != access:
            return None
        return region.view(address, length)

    def find_for_peer(self, qp: Qp, pd: Pd, sge: Sge, access: AccessFlags) -> memoryview | None:
        """Return the memory of a region or window that a key gives the peer of a queue pair access to."""
        address, length, key = sge
        window = self._window(key)
        if window is None:
            return self.find(pd, sge, access)
        if window.key != key or window.pd.root is not pd.root or window.access & access != access:
            return None
        if window.second and window.qp is not qp:
            return None
        view = window.view(address, length)
        self.coverage["through a window"] += view is not None
        return view

    def _may_bind(self, qp: Qp, request: Bind) -> bool:
        region = self.keys.get(request.lkey >> 8)
        if not isinstance(region, Region) or region.key != request.lkey or region.pd.root is not qp.pd.root:
            return False
        if not region.access & AccessFlags.MW_BIND:
            return False
        if request.access & CHANGING and not region.access & AccessFlags.LOCAL_WRITE:
            return False
        return region.view(request.remote_addr, request.length) is not None

    def bind(self, qp: Qp, request: Bind) -> bool:
        """Give a window its next key and a part of a region; a type 1 window may be bound again, or unbound."""
        window = self._window(request.rkey)
        if window is None or window.pd.root is not qp.pd.root or request.access & ~REMOTE_ACCESS:
            return False
        if window.second and (window.region is not None or not request.length):
            return False
        if request.length and not self._may_bind(qp, request):
            return False
        window.unbind()
        window.key = request.rkey
        self.coverage["bound" if request.length else "unbound"] += 1
        if request.length:
            region = self.keys[request.lkey >> 8]
            assert isinstance(region, Region)
            region.windows += 1
            window.region, window.qp = region, qp
            window.address, window.length = request.remote_addr, request.length
            window.access = request.access
        return True

    def invalidate(self, qp: Qp, pd: Pd, key: int) -> bool:
        """Unbind a type 2 window, requested by its queue pair or by the peer of that queue pair."""
        window = self._window(key)
        if window is None or not window.second or window.pd.root is not pd.root:
            return False
        if window.region is None or window.key != key or window.qp is not qp:
            return False
        window.unbind()
        self.coverage["invalidated"] += 1
        return True


def next_key(key: int) -> int:
    """Return the key of a window's next binding, where the user does not choose it."""
    return key & ~0xFF | (key + 1) & 0xFF
