"""In the virtual machine: see what the last power cut left of a storage server's volumes, then load it until the next.

    python tests/rdma/power_guest.py LAST-JOURNAL JOURNAL BACKING DEVICE CUT

What clients know is in a journal, a file of the host's, which a power cut of this machine does not touch. It begins
with what was there; a line is added before a block is written, and one for each block whose flush was acknowledged.
"""

import asyncio
import os
import random
import subprocess
import sys
from pathlib import Path

# This is run as a script; aioverbs is the one that is installed.
sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

from tests.pace import PACE
from tests.storage.loading import check_data, load, shares_of_two
from tests.storage.model import Blocks
from tests.storage.processes import served

DISK = Path("/run/disk")
RESULTS = Path(os.environ.get("AIOVERBS_RESULTS", "/run/vm/results"))


class Journalled(Blocks):
    """Blocks whose state is written down where it outlives this machine.

    :param last: what was written down before.
    :param journal: the file to go on with.
    """

    def __init__(self, blocks: range, last: str, journal: int) -> None:
        super().__init__(blocks)
        self._journal = journal
        for line in last.split("\n")[:-1]:  # what follows the last of them was never written to its end
            kind, block, writing = line.split()
            if int(block) in blocks:
                known = self.latest if kind in ("asked", "write") else self.acknowledged
                known[int(block)] = int(writing)

    def _note(self, kind: str, writings: dict[int, int]) -> None:
        text = "".join(f"{kind} {block} {writing}\n" for block, writing in writings.items()).encode()
        while text:
            text = text[os.write(self._journal, text) :]

    def write(self, block: int) -> bytes:
        """A block's next bytes: this is written down before they are."""
        data = super().write(block)
        self._note("write", {block: self.latest[block]})
        return data

    def flush_completed(self, about: dict[int, int]) -> None:
        """That was acknowledged."""
        changed = {block: writing for block, writing in about.items() if writing != self.acknowledged[block]}
        super().flush_completed(about)
        self._note("flushed", changed)

    def continue_from(self, volume: bytes) -> None:
        """This is there now."""
        super().continue_from(volume)
        self._note("asked", self.latest)
        self._note("there", self.acknowledged)


async def _cut(name: str, seconds: float) -> None:
    await asyncio.sleep(seconds)
    (RESULTS / name).touch()
    await asyncio.sleep(600)


def main(last: Path, journal: Path, backing: str, device: str, cut: str) -> None:
    """See, and load until the machine has no power any more; only see where `cut` names no file that brings that about.

    :param journal: its name is the number of the round.
    """
    DISK.mkdir()
    subprocess.run(["mount", "-t", "ext4", "/dev/vda", DISK], check=True)
    descriptor = os.open(RESULTS / journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    before = last.read_text() if last.exists() else ""
    shares = shares_of_two(lambda blocks: Journalled(blocks, before, descriptor))
    number = int(journal.name)
    chance = random.Random(number)
    with served(DISK / "root", "--backing", backing, device=device, recovers=True) as server:
        if not cut:
            asyncio.run(check_data(server, shares))
        else:
            delay = chance.random() * 0.3 * PACE
            asyncio.run(load(server, shares, chance, lambda: _cut(cut, delay), turn=number, create=not before))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
