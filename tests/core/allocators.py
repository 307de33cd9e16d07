"""Allocators for parent domains: one that records its calls, with answers that tests can replace."""

import ctypes
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aioverbs._core.handles import parent_domain

# Resource types that the software device allocates, with the codes of mlx5.
QP, RECORD, CQ = 1 << 32 | 1, 1 << 32 | 3, 1 << 32 | 5


@dataclass
class Piece:
    """Memory that the provider holds or held."""

    address: int
    size: int
    alignment: int
    resource_type: int
    thread: int
    memory: mmap.mmap
    view: ctypes.Array[ctypes.c_char] | None
    freed: int = 0


@dataclass
class Recording:
    """An allocator of anonymous shared memory, which forks do not copy, that records all calls.

    :param answer: called first; its result is the answer, without an allocation.
    """

    answer: Callable[["Recording", int, int, int], object] | None = None
    pieces: list[Piece] = field(default_factory=list)

    def piece(self, size: int, alignment: int, resource_type: int) -> Piece:
        """Allocate zeroed memory of that size and alignment."""
        memory = mmap.mmap(-1, size + alignment + 8)
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        address = -(-ctypes.addressof(view) // alignment) * alignment
        piece = Piece(address, size, alignment, resource_type, threading.get_ident(), memory, view)
        self.pieces.append(piece)
        return piece

    def allocate(self, size: int, alignment: int, resource_type: int, *of: object) -> Any:
        if self.answer is None:
            return self.piece(size, alignment, resource_type).address
        # Any result is passed on: some tests answer with invalid values.
        return self.answer(self, size, alignment, resource_type)

    def free(self, address: int, resource_type: int, *of: object) -> None:
        (piece,) = (piece for piece in self.pieces if piece.address == address and not piece.freed)
        assert piece.resource_type == resource_type
        piece.freed += 1
        piece.view = None
        piece.memory.close()

    @property
    def live(self) -> list[Piece]:
        """The pieces that the provider holds."""
        return [piece for piece in self.pieces if not piece.freed]

    @property
    def resource_types(self) -> list[int]:
        """The resource types of all pieces, in order."""
        return [piece.resource_type for piece in self.pieces]


def default(*_: object) -> object:
    """Answer that the provider allocates by itself."""
    return parent_domain.USE_DEFAULT
