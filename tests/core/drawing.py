"""Draws for the stateful test: choices, sizes, and ranges of memory; mostly right, sometimes wrong on purpose."""

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

from hypothesis import strategies as st

from aioverbs import AccessFlags
from tests.core.model import Pd, Region, Sge
from tests.core.pairs import ALL_ACCESS

T = TypeVar("T")

MESSAGE, SHORT = 600, 30  # bytes: the longest takes three packets of the shortest MTU; every region has room for it
LARGE = 6000  # bytes: more than one packet of any MTU


@cache
def _below(limit: int) -> st.SearchStrategy[int]:
    return st.integers(0, limit - 1)


class Dice:
    """A source of decisions."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def __repr__(self) -> str:
        return "dice"  # what was drawn shows in what was done

    def below(self, limit: int) -> int:
        return self._draw(_below(limit))

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def maybe(self) -> bool:
        return self.below(2) == 1

    def rarely(self, one_in: int = 12) -> bool:
        """Not on the simplest path: what is shrunk does not do it."""
        return self.below(one_in) == one_in - 1

    def access(self) -> AccessFlags:
        """Of a region or a queue pair: mostly everything."""
        if not self.rarely():
            return ALL_ACCESS
        access = AccessFlags(self.below(16))
        remote = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
        return access | AccessFlags.LOCAL_WRITE if access & remote else access


@st.composite
def dice(draw: st.DrawFn) -> Dice:
    return Dice(draw)


class RangeDrawer:
    """Draws parts of the memory that there is."""

    def __init__(self, dice: Dice, regions: Sequence[Region]) -> None:
        self.dice = dice
        self.regions = regions

    def _region(self, pd: Pd, far: bool) -> Region | None:
        """One that a queue pair of the domain may use from or to that side; sometimes any."""
        side = [region for region in self.regions if region.buffer.far == far]
        fitting = [region for region in side if region.open and region.pd.root is pd.root]
        if fitting and not self.dice.rarely(60):
            return self.dice.pick(fitting)
        return self.dice.pick(side) if side else None

    def sge(self, pd: Pd, far: bool, length: int) -> Sge:
        """A range of a region, or one with something wrong."""
        region = self._region(pd, far)
        if region is None:
            return 4096, 8, 7
        length = min(length, region.length)
        offset = self.dice.below(region.length - length + 1)
        match self.dice.below(100):
            case 99:
                return region.address + offset, length, region.key ^ 1 << 31
            case 98:
                return region.address + region.length - max(length - 1, 0), length, region.key
            case 97:
                return region.address - 1, length, region.key
        return region.address + offset, length, region.key

    def readable(self, sge: Sge) -> Sge:
        """Inline data is read by the caller: where nothing is, nothing can be read."""
        for region in self.regions:
            if region.key == sge[2] and region.view(sge[0], sge[1]) is not None:
                return sge
        return sge[0], 0, 0
