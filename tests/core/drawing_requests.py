"""Random work requests for a type of queue pair: mostly valid, sometimes invalid on purpose."""

from collections.abc import Sequence
from dataclasses import dataclass

from aioverbs import AccessFlags, QpType, SendOpcode
from tests.core.drawing import MESSAGE, SHORT, Dice, RangeDrawer
from tests.core.model import AddressHandle, Pd, Queue, Region, Sge, Window
from tests.core.model_datagrams import HEADER
from tests.core.model_execution import BY_DEFAULT_KEY, CAN_SEND
from tests.core.model_memory import REMOTE_ACCESS, next_key
from tests.core.model_queue_pairs import Bind, Qp, Receive, Send, SharedQueue
from tests.core.model_responder import ANSWERED, ATOMIC

IMMEDIATES = [0, 0x01020304, 0xFFFFFFFF]
OPERANDS = [0, 1, 0x0102030405060708, (1 << 64) - 1]


@dataclass(frozen=True)
class Aim:
    """A destination of requests: peer, domain and shared queue that serve it, and a datagram's address handle."""

    peer: Qp | None
    pd: Pd
    shared: SharedQueue | None = None
    ah: AddressHandle | None = None

    @property
    def queue(self) -> Queue | None:
        """The queue on which receives complete."""
        if self.shared and self.shared.cq:
            return self.shared.cq
        return self.peer.recv_cq if self.peer else None


class RequestDrawer(RangeDrawer):
    """Draws requests over the registered memory and the windows."""

    def __init__(self, dice: Dice, regions: Sequence[Region], windows: Sequence[Window]) -> None:
        super().__init__(dice, regions)
        self.windows = windows

    # ---- Receives

    def receive(self, pd: Pd, max_sge: int, wr_id: int) -> Receive:
        """Return a receive, mostly with room for every message sent here."""
        count = max_sge + 1 if self.dice.rarely(30) else self.dice.between(min(1, max_sge), max_sge)
        shortest = 0 if self.dice.rarely() else MESSAGE
        lengths = [self.dice.between(shortest, MESSAGE + 10) for _ in range(count)]
        return Receive(wr_id, [self.sge(pd, True, length) for length in lengths])

    # ---- Sends

    def send(self, qp: Qp, aim: Aim, wr_id: int, opcodes: Sequence[SendOpcode]) -> Send:
        dice, opcode = self.dice, self._opcode(qp, opcodes)
        to_invalidate = self._bound_to(aim.peer)
        invalidate = 0
        if opcode is SendOpcode.SEND and qp.type is not QpType.UD:
            if to_invalidate and dice.rarely(3):
                invalidate = dice.pick(to_invalidate).key
            elif self.windows and dice.rarely(20):
                invalidate = dice.pick(self.windows).key
        if invalidate:
            opcode = SendOpcode.SEND_WITH_INV
        inline = dice.rarely(3) if opcode not in ANSWERED else dice.rarely(40)
        sges = self._sges(qp, opcode)
        if inline:
            sges = [self.readable(sge) for sge in sges if self.readable(sge)[1]]
        address, key = self._target(aim, sum(sge[1] for sge in sges))
        if opcode in ATOMIC and not dice.rarely(20):
            address -= address % 8
        request = Send(
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
            invalidate=invalidate,
        )
        self._address(qp, aim, request)
        return request

    def datagram(self, qp: Qp, aim: Aim, wr_id: int, sge: Sge) -> Send:
        request = Send(wr_id, SendOpcode.SEND, [sge])
        self._address(qp, aim, request)
        return request

    def _opcode(self, qp: Qp, opcodes: Sequence[SendOpcode]) -> SendOpcode:
        """Return an opcode, mostly one that the type can send."""
        possible = [opcode for opcode in opcodes if opcode in CAN_SEND[qp.type]] or [SendOpcode.SEND]
        return self.dice.pick(opcodes if self.dice.rarely(40) else possible)

    def _address(self, qp: Qp, aim: Aim, request: Send) -> None:
        """Set the destination of a datagram, or the shared queue of an XRC request."""
        dice = self.dice
        if qp.type is QpType.UD:
            request.ah = aim.ah
            request.remote_qpn = aim.peer.number if aim.peer and not dice.rarely(30) else 1 << 23
            key = aim.peer.qkey if aim.peer else 0
            if dice.rarely(20):
                key = key ^ 1
            elif dice.rarely(20):
                key = BY_DEFAULT_KEY
            request.remote_qkey = key
        elif qp.type is QpType.XRC_SEND:
            request.remote_srqn = aim.shared.number if aim.shared and not dice.rarely(60) else 0

    def _sges(self, qp: Qp, opcode: SendOpcode) -> list[Sge]:
        most, dice = qp.capabilities.max_send_sge, self.dice
        if opcode in ATOMIC:
            return [self.sge(qp.pd, False, 4 if dice.rarely(30) else 8)][:most]
        count = most + 1 if dice.rarely(40) else dice.between(min(1, most), most)
        longest = MESSAGE if dice.rarely(4) else SHORT
        if qp.type is QpType.UD:
            longest = min(longest, MESSAGE - HEADER)
        return [self.sge(qp.pd, False, dice.below(longest // max(count, 1) + 1)) for _ in range(count)]

    def _target(self, aim: Aim, length: int) -> tuple[int, int]:
        """Return an address and its key, of a region, or of a window bound to one."""
        bound = [window for window in self.windows if window.region]
        fitting = [
            window for window in bound if window.pd.root is aim.pd.root and (not window.second or window.qp is aim.peer)
        ]
        if bound and self.dice.rarely(6):
            fitting = bound
        elif not fitting or self.dice.maybe():
            address, _, key = self.sge(aim.pd, True, length)
            return address, key
        window = self.dice.pick(fitting)
        slack = max(window.length - length, 0)
        offset = slack + 1 if self.dice.rarely(8) else self.dice.below(slack + 1)
        key = next_key(window.key) if self.dice.rarely(8) else window.key
        return window.address + offset, key

    # ---- Windows

    def _bound_to(self, qp: Qp | None) -> list[Window]:
        """Return the bound type 2 windows that the queue pair or its peer may invalidate."""
        return [window for window in self.windows if window.second and window.region and qp and window.qp is qp]

    def _signaled(self, qp: Qp) -> bool:
        """Return whether a request is signaled: on a device thread only a completion shows work without a PSN."""
        return qp.context.mode == "thread" or self.dice.maybe()

    def window_request(self, qp: Qp, window: Window, wr_id: int) -> Send:
        """Return a request that binds or unbinds a window."""
        mine = self._bound_to(qp)
        wrong = self.dice.rarely(8)
        if (mine and self.dice.rarely(3)) or (window in mine and not wrong):
            key = window.key if window in mine else self.dice.pick(mine).key
            key = next_key(key) if wrong else key
            return Send(wr_id, SendOpcode.LOCAL_INV, signaled=self._signaled(qp), invalidate=key)
        return self._bind(qp, window, wr_id, wrong)

    def _bind(self, qp: Qp, window: Window, wr_id: int, wrong: bool) -> Bind:
        dice = self.dice
        far = [region for region in self.regions if region.open and region.buffer.far]
        known = [region for region in far if region.context is qp.context]
        alike = [region for region in known if region.pd.root is qp.pd.root]
        fitting = [region for region in alike if region.access & AccessFlags.MW_BIND]
        request = Bind(wr_id, SendOpcode.BIND_MW, signaled=self._signaled(qp), window=window)
        request.rkey = next_key(window.posted_rkey)
        if window.second and dice.maybe():
            request.rkey = window.posted_rkey ^ dice.pick([0x80, 0xFF, 0x100] if wrong else [0x80, 0xFF])
        candidates = (known if dice.maybe() else alike) if wrong else fitting
        if not candidates or (not window.second and dice.rarely(4)):
            return request
        region = dice.pick(candidates)
        offset = dice.below(20)
        request.region, request.lkey = region, region.key
        request.remote_addr = region.address + offset
        request.length = region.length - offset - dice.below(20) + 30 * dice.rarely(30)
        request.access = AccessFlags(dice.below(16)) if dice.rarely(4) else REMOTE_ACCESS
        return request
