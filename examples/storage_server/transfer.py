"""Copy whole files to and from volumes, in several concurrent pieces, with progress reports."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from storage_server.errors import InvalidError
from storage_server.remote_volume import PIECE, RemoteVolume, for_each_concurrently

__all__ = ["bars", "get", "put"]

OnProgress = Callable[[int], object]
"""Called with the number of bytes transferred since the last call."""


def bars(console: Console) -> Progress:
    """Return progress bars, to be used with ``with``. They are shown only on terminals."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


async def put(
    path: Path, volume: RemoteVolume, on_progress: OnProgress, *, offset: int = 0, verify: bool = False
) -> None:
    """Write a file to a volume and flush the volume.

    :param path: path of the file.
    :param volume: the volume, open for writing.
    :param on_progress: called with the number of bytes of each piece that was written.
    :param offset: first byte in the volume.
    :param verify: whether to compare checksums with the server.
    :raises InvalidError: the file does not fit into the volume.
    :raises OSError: the file cannot be read.
    :raises StorageError: `RemoteVolume.write` or `RemoteVolume.flush` failed.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if offset + size > volume.size:
            raise InvalidError(f"{path} has {size:,} bytes, but volume {volume.name!r} has {volume.size:,}: resize it")

        async def put_piece(at: int) -> None:
            data = await asyncio.to_thread(os.pread, file.fileno(), min(PIECE, size - at), at)
            await volume.write(offset + at, data, verify=verify)
            on_progress(len(data))

        await for_each_concurrently(put_piece, range(0, size, PIECE))
        await volume.flush()


async def get(
    volume: RemoteVolume,
    path: Path,
    on_progress: OnProgress,
    *,
    offset: int = 0,
    size: int | None = None,
    verify: bool = False,
) -> None:
    """Read a volume to a file, which appears only once it is complete.

    :param volume: the volume.
    :param path: path of the file, which is replaced if it exists.
    :param on_progress: called with the number of bytes of each piece that was read.
    :param offset: first byte in the volume.
    :param size: number of bytes; None for all bytes from ``offset`` onwards.
    :param verify: whether to compare checksums with the server.
    :raises OSError: the file cannot be written.
    :raises StorageError: `RemoteVolume.read` failed.
    """
    length = volume.size - offset if size is None else size
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with partial.open("wb", buffering=0) as file:

            async def get_piece(at: int) -> None:
                data = await volume.read(offset + at, min(PIECE, length - at), verify=verify)
                await asyncio.to_thread(os.pwrite, file.fileno(), data, at)
                on_progress(len(data))

            await for_each_concurrently(get_piece, range(0, length, PIECE))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
