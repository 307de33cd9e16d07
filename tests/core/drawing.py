"""Random choices for the stateful test: mostly valid values, sometimes invalid ones on purpose."""

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

from hypothesis import strategies as st

from aioverbs import AccessFlags
from tests.core.model import Pd, Region, Sge
from tests.core.pairs import ALL_ACCESS

T = TypeVar("T")

MESSAGE, SHORT = 600, 30  # bytes: the longest takes three packets of the smallest MTU; every region has room for it
LARGE = 6000  # bytes: more than one packet of any MTU


@cache
def _below(limit: int) -> st.SearchStrategy[int]:
    return st.integers(0, limit - 1)


class Dice:
    """A source of random choices."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def __repr__(self) -> str:
        return "dice"  # the choices show in the steps that are printed

    def below(self, limit: int) -> int:
        return self._draw(_below(limit))

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def maybe(self) -> bool:
        return self.below(2) == 1

    def rarely(self, one_in: int = 12) -> bool:
        """Return True once in `one_in`, and False in the simplest example, so that shrinking avoids it."""
        return self.below(one_in) == one_in - 1

    def access(self) -> AccessFlags:
        """Return access flags for a region or a queue pair, mostly all of them."""
        if not self.rarely():
            return ALL_ACCESS
        access = AccessFlags(self.below(16))
        remote = AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_ATOMIC
        return access | AccessFlags.LOCAL_WRITE if access & remote else access


@st.composite
def dice(draw: st.DrawFn) -> Dice:
    return Dice(draw)


class RangeDrawer:
    """Draws parts of registered memory."""

    def __init__(self, dice: Dice, regions: Sequence[Region]) -> None:
        self.dice = dice
        self.regions = regions

    def _region(self, pd: Pd, far: bool) -> Region | None:
        """Return a region on that side that a queue pair of the domain may use, or rarely any."""
        side = [region for region in self.regions if region.buffer.far == far]
        fitting = [region for region in side if region.open and region.pd.root is pd.root]
        if fitting and not self.dice.rarely(60):
            return self.dice.pick(fitting)
        return self.dice.pick(side) if side else None

    def sge(self, pd: Pd, far: bool, length: int) -> Sge:
        """Return a range of a region, or rarely an invalid one."""
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
        """Return `sge` if its memory exists, or an empty one: posting reads inline data at once."""
        for region in self.regions:
            if region.key == sge[2] and region.view(sge[0], sge[1]) is not None:
                return sge
        return sge[0], 0, 0
