"""Guest part of power_cuts.py: check the volumes after the last power cut, then load the server until the next.

    python tests/rdma/power_guest.py LAST-JOURNAL JOURNAL BACKING DEVICE CUT

The clients' knowledge is in a journal, a file on the host, which a power cut of this machine does not affect. It begins
with the state found; a line is added before each write of a block, and one for each block whose flush was acknowledged.
"""

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

# Run as a script, with the installed aioverbs.
sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from tests.pace import PACE
from tests.storage.loading import check_data, load, shares_of_two
from tests.storage.model import Blocks
from tests.storage.processes import served

DISK = Path("/run/disk")
RESULTS = Path(os.environ.get("AIOVERBS_RESULTS", "/run/vm/results"))


class Journalled(Blocks):
    """Blocks whose model is written to a journal that outlives this machine.

    :param last: the previous journal's contents.
    :param journal: the file to continue in.
    """

    def __init__(self, blocks: range, last: str, journal: int) -> None:
        super().__init__(blocks)
        self._journal = journal
        for line in last.split("\n")[:-1]:  # text after the last newline was not written completely
            kind, block, writing = line.split()
            if int(block) in blocks:
                known = self.latest if kind in ("asked", "write") else self.acknowledged
                known[int(block)] = int(writing)

    def _append_to_journal(self, kind: str, writings: dict[int, int]) -> None:
        text = "".join(f"{kind} {block} {writing}\n" for block, writing in writings.items()).encode()
        while text:
            text = text[os.write(self._journal, text) :]

    def write(self, block: int) -> bytes:
        """Return a block's next contents, after recording the write in the journal."""
        data = super().write(block)
        self._append_to_journal("write", {block: self.latest[block]})
        return data

    def flush_completed(self, about: dict[int, int]) -> None:
        """Record that a flush was acknowledged."""
        changed = {block: writing for block, writing in about.items() if writing != self.acknowledged[block]}
        super().flush_completed(about)
        self._append_to_journal("flushed", changed)

    def continue_from(self, volume: bytes) -> None:
        """Record the contents found."""
        super().continue_from(volume)
        self._append_to_journal("asked", self.latest)
        self._append_to_journal("there", self.acknowledged)


async def _cut(name: str, seconds: float) -> None:
    await asyncio.sleep(seconds)
    (RESULTS / name).touch()
    await asyncio.sleep(600)


def main(last: Path, journal: Path, backing: str, device: str, cut: str) -> None:
    """Check, and load until the power is cut; check only if `cut` names no file.

    :param journal: named by the number of the round.
    """
    DISK.mkdir()
    subprocess.run(["mount", "-t", "ext4", "/dev/vda", DISK], check=True)
    descriptor = os.open(RESULTS / journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    before = last.read_text() if last.exists() else ""
    shares = shares_of_two(lambda blocks: Journalled(blocks, before, descriptor))
    number = int(journal.name)
    rng = random.Random(number)
    with served(DISK / "root", "--backing", backing, device=device, recovers=True) as server:
        if not cut:
            asyncio.run(check_data(server, shares))
        else:
            delay = rng.random() * 0.3 * PACE
            asyncio.run(load(server, shares, rng, lambda: _cut(cut, delay), turn=number, create=not before))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
