"""Whole files to and from volumes, in pieces, several at a time, with somebody told how far it is."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from storage_server.errors import InvalidError
from storage_server.remote_volume import PIECE, RemoteVolume, several

__all__ = ["get", "put"]

Tell = Callable[[int], object]
"""Is told of so many more bytes."""


async def put(path: Path, volume: RemoteVolume, tell: Tell, *, verify: bool = False) -> None:
    """Write a file to the beginning of a volume, and flush it.

    :raises InvalidError: it is longer than the volume.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size > volume.size:
            raise InvalidError(f"{path} has {size:,} bytes, and volume {volume.name!r} {volume.size:,}: resize it")

        async def put_piece(at: int) -> None:
            data = await asyncio.to_thread(os.pread, file.fileno(), min(PIECE, size - at), at)
            await volume.write(at, data, verify=verify)
            tell(len(data))

        await several(put_piece, range(0, size, PIECE))
        await volume.flush()


async def get(volume: RemoteVolume, path: Path, tell: Tell, *, verify: bool = False) -> None:
    """Read a volume to a file, which is there when all of it is."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb", buffering=0) as file:

            async def get_piece(at: int) -> None:
                data = await volume.read(at, min(PIECE, volume.size - at), verify=verify)
                await asyncio.to_thread(os.pwrite, file.fileno(), data, at)
                tell(len(data))

            await several(get_piece, range(0, volume.size, PIECE))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
