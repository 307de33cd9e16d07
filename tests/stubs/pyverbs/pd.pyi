# What aioverbs and its tests use of pyverbs.pd. PD.pd is left out on purpose: reading it takes a C struct for a
# Python object.

from typing import Self

from pyverbs.base import PyverbsCM
from pyverbs.device import Context

class PD(PyverbsCM):
    def __init__(self, creator: Context) -> None: ...
    def __enter__(self) -> Self: ...
    @property
    def handle(self) -> int: ...
