"""What came of a demonstration, as a program is told of it."""

from dataclasses import dataclass

from aioverbs.cli.demonstration.misuse import Misuse
from aioverbs.cli.demonstration.storage import Counts
from aioverbs.cli.histogram import Histogram
from aioverbs.cli.inventory import DeviceReport
from aioverbs.cli.rates import Report

__all__ = ["Outcome", "Plan", "Transfer", "Tree"]


@dataclass(frozen=True)
class Plan:
    """What is to be demonstrated.

    :param device: its name; None: the best there is.
    :param total: bytes of all files together.
    :param clients: processes.
    :param workers: loops of the server.
    :param seconds: how long single blocks are read.
    :param seed: files are made from it.
    """

    device: str | None = None
    total: int = 200 << 20
    clients: int = 2
    workers: int = 2
    seconds: float = 3.0
    seed: int = 1


@dataclass(frozen=True)
class Transfer:
    """All files, written or read.

    :param seconds: from the first client's beginning to the last one's end, with all that they do besides.
    :param requests_s: of that, how long requests were under way, for each client.
    :param bytes_per_s: the sum of what the clients moved in each of their seconds in which requests were under way.
    """

    bytes: int
    seconds: float
    requests_s: tuple[float, ...]
    bytes_per_s: float


@dataclass(frozen=True)
class Tree:
    """What a process had open, and what it was at."""

    name: str
    pid: int
    report: Report


@dataclass(frozen=True)
class Outcome:
    """All of it.

    :param reason: why it was this device.
    :param files: how many were made; so `bytes`.
    :param verified_files: those of which every byte was what was written; so `verified_bytes`.
    :param faults: what was not, the first of them.
    :param block_reads: how long each read of 4 KiB took, in nanoseconds.
    :param block_reads_s: how long that went on.
    :param flushes: how long each took, as clients saw it, in nanoseconds.
    :param counts: of the server.
    :param seconds: from beginning to end.
    """

    plan: Plan
    device: DeviceReport
    reason: str
    loop: str
    files: int
    bytes: int
    written: Transfer
    read: Transfer
    verified_files: int
    verified_bytes: int
    faults: tuple[str, ...]
    block_reads: Histogram
    flushes: Histogram
    counts: Counts
    misuse: Misuse
    trees: tuple[Tree, ...]
    seconds: float

    @property
    def everything_read(self) -> bool:
        """Whether all files were read back as they were written."""
        complete = (self.verified_files, self.verified_bytes) == (self.files, self.bytes)
        return complete and not self.faults

    @property
    def stopped(self) -> bool:
        """Whether the call from a wrong loop was, and did no harm."""
        return self.misuse.error is not None and self.misuse.untouched and self.misuse.works

    @property
    def good(self) -> bool:
        """Whether all was as it should be."""
        return self.everything_read and self.stopped and self.block_reads.count > 0
