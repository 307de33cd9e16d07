"""`ibv_import_device` for soft-RoCE, which lacks it: the shim's functions, put into the table of exported verbs."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from aioverbs._core.handles import handles

VERBS = ("import_device", "import_pd", "unimport_pd")


class Counts(ctypes.Structure):
    """``struct shim_imports``."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("devices", "pds", "unimported")]


class Imports:
    """The shim's verbs, which new contexts use from here on."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ["AIOVERBS_TEST_SHIM"])
        self._slots = [ctypes.c_void_p.from_address(handles.table_slot(verb)) for verb in VERBS]
        self._before = [slot.value for slot in self._slots]
        for slot, verb in zip(self._slots, VERBS, strict=True):
            slot.value = ctypes.cast(getattr(self.library, f"shim_{verb}"), ctypes.c_void_p).value

    def restore(self) -> None:
        """Restore the provider's verbs."""
        for slot, value in zip(self._slots, self._before, strict=True):
            slot.value = value

    def counts(self) -> tuple[int, int, int]:
        """Return the number of imported devices, imported protection domains, and unimported protection domains."""
        counts = Counts()
        self.library.shim_count_imports(ctypes.byref(counts))
        return counts.devices, counts.pds, counts.unimported


@contextmanager
def imports() -> Iterator[Imports]:
    """Use the shim's verbs for the duration of the block."""
    made = Imports()
    try:
        yield made
    finally:
        made.restore()
