"""Draws for the stateful test: sizes, ranges, requests; mostly right, sometimes wrong on purpose."""

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

from hypothesis import strategies as st

from aioverbs import AccessFlags, SendOpcode
from tests.core.model import Pd, Qp, Receive, Region, Send, Sge
from tests.core.model_execution import ANSWERED, ATOMIC
from tests.core.pairs import ALL_ACCESS

T = TypeVar("T")

MESSAGE, SHORT = 600, 30  # bytes: the longest takes three packets of the shortest MTU; every region has room for it
IMMEDIATES = [0, 0x01020304, 0xFFFFFFFF]
OPERANDS = [0, 1, 0x0102030405060708, (1 << 64) - 1]


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


class Drawer:
    """Draws requests over the memory that there is."""

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
        match self.dice.below(200):
            case 99:
                return region.address + offset, length, region.key ^ 1 << 31
            case 98:
                return region.address + region.length - max(length - 1, 0), length, region.key
            case 97:
                return region.address - 1, length, region.key
        return region.address + offset, length, region.key

    def receive(self, qp: Qp, wr_id: int) -> Receive:
        """Mostly with room for all that is sent here."""
        most = qp.capabilities.max_recv_sge
        count = most + 1 if self.dice.rarely(30) else self.dice.between(min(1, most), most)
        shortest = 0 if self.dice.rarely() else MESSAGE
        lengths = [self.dice.between(shortest, MESSAGE + 10) for _ in range(count)]
        return Receive(wr_id, [self.sge(qp.pd, True, length) for length in lengths])

    def send(self, qp: Qp, peer: Qp | None, wr_id: int, opcodes: Sequence[SendOpcode]) -> Send:
        dice, opcode = self.dice, self.dice.pick(opcodes)
        inline = dice.rarely(3) if opcode not in ANSWERED else dice.rarely(40)
        sges = self._sges(qp, opcode)
        if inline:
            sges = [self._inside(sge) for sge in sges if self._inside(sge)[1]]
        address, _, key = self.sge((peer or qp).pd, True, sum(sge[1] for sge in sges))
        if opcode in ATOMIC and not dice.rarely(20):
            address -= address % 8
        return Send(
            wr_id=wr_id,
            opcode=opcode,
            sges=sges,
            signaled=dice.maybe(),
            solicited=dice.rarely(4),
            inline=b"" if inline else None,
            remote_addr=address,
            rkey=key,
            imm_data=dice.pick(IMMEDIATES),
            compare_add=dice.pick(OPERANDS),
            swap=dice.pick(OPERANDS) if opcode is SendOpcode.ATOMIC_CMP_AND_SWP else 0,
        )

    def _sges(self, qp: Qp, opcode: SendOpcode) -> list[Sge]:
        most = qp.capabilities.max_send_sge
        if opcode in ATOMIC:
            return [self.sge(qp.pd, False, 4 if self.dice.rarely(30) else 8)][:most]
        count = most + 1 if self.dice.rarely(40) else self.dice.between(min(1, most), most)
        longest = MESSAGE if self.dice.rarely(4) else SHORT
        return [self.sge(qp.pd, False, self.dice.below(longest // max(count, 1) + 1)) for _ in range(count)]

    def _inside(self, sge: Sge) -> Sge:
        """Inline data is read by the caller: where nothing is, nothing can be read."""
        for region in self.regions:
            if region.key == sge[2] and region.view(sge[0], sge[1]) is not None:
                return sge
        return sge[0], 0, 0
