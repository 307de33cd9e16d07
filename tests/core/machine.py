"""The steps that the stateful test is made of: each does one thing to the twins."""

from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine

from aioverbs import Mtu, QpState, SendOpcode, VerbsError
from aioverbs._core import domains, engine
from aioverbs.attributes import QpCapabilities
from tests.core.allocators import Recording
from tests.core.contexts import open_context
from tests.core.drawing import MESSAGE, Dice, Drawer
from tests.core.model import RECEIVE_SIDE, SEND_SIDE, Channel, Context, Pd, Qp, Queue, Region, Td
from tests.core.pairs import to_init, to_rtr
from tests.core.twins import Twins

ONE_SIDED = [
    SendOpcode.RDMA_WRITE,
    SendOpcode.RDMA_READ,
    SendOpcode.ATOMIC_FETCH_AND_ADD,
    SendOpcode.ATOMIC_CMP_AND_SWP,
]
MESSAGES = [SendOpcode.SEND, SendOpcode.SEND_WITH_IMM, SendOpcode.RDMA_WRITE_WITH_IMM]
PSNS = [0, 0xFFFFFE, 0x123456]
MTUS = [Mtu.MTU_256, Mtu.MTU_512, Mtu.MTU_4096]


def power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length() if at_least else 0


class Bench(RuleBasedStateMachine):
    """What rules do, as far as more than one of them does it. What it is done to is drawn from what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins()

    # ---- making

    # ---- work

    def work(self, dice: Dice) -> None:
        """Before most steps: whole rules are left out of a run at random, and some of them are all that posts."""
        twins = self.twins
        if not twins.of(Context) or not dice.maybe():
            return
        if len(twins.of(Qp)) < 2:
            pds = twins.of(Pd) or [self.add_pd(dice.pick(twins.of(Context)))]
            if not twins.of(Queue, pds[-1].context):
                self.add_queue(pds[-1].context, None, None, 50, extended=dice.maybe(), single_threaded=False)
            self.add_qp(dice)
        if twins.of(Qp):
            self.post(dice, ONE_SIDED + MESSAGES)

    def open_context(self, mode: str) -> None:
        self.twins.add(Context(mode=mode), open_context(mode))

    def add_pd(self, context: Context) -> Pd:
        pd = Pd((context,), context=context)
        self.twins.add(pd, engine.ProtectionDomain(self.twins.handle(context, engine.Context)))
        return pd

    def add_td(self, context: Context) -> Td:
        td = Td((context,), context=context)
        self.twins.add(td, domains.ThreadDomain(self.twins.handle(context, engine.Context)))
        return td

    def add_parent_domain(self, dice: Dice, base: Pd, td: Td | None) -> Pd:
        twins = self.twins
        allocator = Recording() if dice.maybe() else None
        domain = Pd((base, td) if td else (base,), context=base.context, base=base, allocates=allocator is not None)
        handle = domains.ParentDomain(
            twins.handle(base, engine.ProtectionDomain),
            twins.handle(td, domains.ThreadDomain) if td else None,
            allocator,
        )
        twins.add(domain, handle)
        twins.allocators += [allocator] if allocator else []
        return domain

    def add_region(self, dice: Dice, pd: Pd, far: bool) -> None:
        """Over new memory, or over a part of what is registered already."""
        twins = self.twins
        known = [pair for pair in twins.memories if pair[0].far == far]
        buffer, memory = (
            dice.pick(known) if known and dice.rarely(3) else twins.new_buffer(dice.pick([MESSAGE + 30, 1000]), far)
        )
        offset = dice.pick([0, 0, 8, 17])
        length = len(memory) - offset - dice.pick([0, 0, 5])
        access = dice.access()
        handle = engine.MemoryRegion(
            twins.handle(pd, engine.ProtectionDomain), memoryview(memory)[offset : offset + length], access
        )
        region = Region((pd,), 0, True, pd.context, pd, buffer, offset, length, access, handle.lkey)
        assert handle.address == region.address
        assert handle.lkey not in twins.fabric.regions
        twins.add(region, handle)
        twins.regions.append(region)
        twins.fabric.regions[region.key] = region

    def furnish(self, dice: Dice, pd: Pd, far: bool) -> None:
        """See that a domain has a region on that side."""
        regions = self.twins.of(Region)
        if not any(region.pd.root is pd.root and region.buffer.far == far for region in regions):
            self.add_region(dice, pd, far)

    def add_channel(self, context: Context) -> Channel:
        channel = Channel((context,), context=context)
        self.twins.add(channel, engine.CompletionChannel(self.twins.handle(context, engine.Context)))
        return channel

    def add_queue(
        self,
        context: Context,
        channel: Channel | None,
        domain: Pd | None,
        cqe: int,
        *,
        extended: bool,
        single_threaded: bool,
    ) -> None:
        twins = self.twins
        handle = engine.CompletionQueue(
            twins.handle(context, engine.Context),
            cqe,
            twins.handle(channel, engine.CompletionChannel) if channel else None,
            extended=extended,
            parent_domain=twins.handle(domain, engine.ProtectionDomain) if domain else None,
            single_threaded=single_threaded,
        )
        parents = tuple(parent for parent in (context, channel, domain) if parent)
        assert handle.cqe == power_of_two(cqe)
        queue = Queue(parents, context=context, size=handle.cqe, channel=channel, domain=domain)
        twins.add(queue, handle)
        if domain and domain.allocates:
            domain.held += 2

    def add_qp(self, dice: Dice) -> None:
        twins = self.twins
        registered = {region.pd.root for region in twins.of(Region)}
        useful = [pd for pd in twins.of(Pd) if pd.root in registered]
        pd = dice.pick(useful if useful and not dice.rarely() else twins.of(Pd))
        wanted = QpCapabilities(
            max_send_wr=dice.pick([4, 8, 7, 1, 0]) if dice.rarely(4) else 8,
            max_recv_wr=dice.pick([4, 8, 7, 1, 0]) if dice.rarely(4) else 8,
            max_send_sge=0 if dice.rarely(20) else dice.between(1, 3),
            max_recv_sge=0 if dice.rarely(20) else dice.between(1, 3),
            max_inline_data=dice.pick([64, 32, 0]),
        )
        # A queue overflows only where it was promised to too many: these have room for all that can come.
        depth = power_of_two(wanted.max_send_wr) + power_of_two(wanted.max_recv_wr)
        roomy = [queue for queue in twins.of(Queue, pd.context) if queue.promised + depth <= queue.size]
        if not roomy:
            return
        send_cq, recv_cq = dice.pick(roomy), dice.pick(roomy)
        sig_all = dice.rarely(4)
        handle = engine.QueuePair(
            twins.handle(pd, engine.ProtectionDomain),
            twins.cq(send_cq),
            twins.cq(recv_cq),
            wanted,
            sq_sig_all=sig_all,
        )
        assert handle.capabilities.max_send_wr == power_of_two(wanted.max_send_wr)
        assert handle.capabilities.max_inline_data >= wanted.max_inline_data
        qp = Qp(
            (pd, send_cq, recv_cq),
            context=pd.context,
            pd=pd,
            send_cq=send_cq,
            recv_cq=recv_cq,
            capabilities=handle.capabilities,
            sig_all=sig_all,
            number=handle.qp_num,
        )
        assert qp.number not in twins.fabric.qps
        twins.add(qp, handle)
        twins.fabric.qps[qp.number] = qp
        for queue in {send_cq, recv_cq}:
            queue.promised += twins.promise(qp, queue)
        pd.held += 2 * pd.allocates

    def to_state(self, dice: Dice, qp: Qp, state: QpState, peer: int, psns: tuple[int, int]) -> None:
        """Change a state with new attributes; or not, where the model says so."""
        twins, handle = self.twins, self.twins.qp(qp)
        twins.settle()
        note(f"modify {handle} to {state.name}, peer {peer}, PSNs {psns}")
        access, mtu = dice.access(), dice.pick(MTUS)
        reads = 0 if dice.rarely(20) else 16
        error = 0
        try:
            match state:
                case QpState.INIT:
                    to_init(handle, access)
                case QpState.RTR:
                    to_rtr(handle, peer, psn=psns[0], max_dest_rd_atomic=reads, path_mtu=mtu)
                case QpState.RTS:
                    handle.modify(state, timeout=1, retry_cnt=0, rnr_retry=0, sq_psn=psns[1], max_rd_atomic=reads)
                case _:
                    handle.modify(state)
        except VerbsError as refusal:
            error = refusal.errno
        assert error == twins.fabric.modify(qp, state)
        if not error:
            match state:
                case QpState.INIT:
                    qp.access = access
                case QpState.RTR:
                    qp.peer, qp.expected_psn, qp.reads_served, qp.mtu = peer, psns[0], reads, mtu.size
                case QpState.RTS:
                    qp.next_psn, qp.reads = psns[1], reads
        twins.under_way = qp

    def join(self, dice: Dice, *ends: Qp) -> None:
        """Take one or two queue pairs to RTS; with itself, with each other."""
        psns = [dice.pick(PSNS) for _ in ends]
        for qp, peer, own, other in zip(ends, reversed(ends), psns, reversed(psns), strict=True):
            own = dice.pick(PSNS) if dice.rarely(20) else own  # out of sequence: nobody answers
            for state in (QpState.RESET, QpState.INIT, QpState.RTR, QpState.RTS):
                self.to_state(dice, qp, state, peer.number, (other, own))

    def sender(self, dice: Dice) -> Qp:
        """Mostly one that works: where there is none, connect some."""
        twins, qps = self.twins, self.twins.of(Qp)
        if dice.rarely(8):
            return dice.pick(qps)
        working = [qp for qp in qps if qp.state is QpState.RTS and twins.fabric.peer_of(qp)]
        if not working:
            near, far = dice.pick(qps), dice.pick(qps)
            self.join(dice, *([near] if near is far else [near, far]))
            return near
        return dice.pick(working)

    def post(self, dice: Dice, opcodes: list[SendOpcode]) -> None:
        self.post_to(dice, self.sender(dice), opcodes)

    def post_to(self, dice: Dice, qp: Qp, opcodes: list[SendOpcode]) -> None:
        """Post some requests to a queue pair, one behind the other, without waiting for them."""
        twins = self.twins
        drawer = Drawer(dice, twins.regions)
        count = dice.between(1, 4)
        peer = twins.fabric.qps.get(qp.peer)
        if not dice.rarely():
            self.furnish(dice, qp.pd, far=False)
            self.furnish(dice, peer.pd if peer else qp.pd, far=True)
        if peer and opcodes is not ONE_SIDED and not dice.rarely():
            for _ in range(count - len(peer.receives)):
                twins.post_recv(peer, drawer.receive(peer, twins.new_wr_id(RECEIVE_SIDE)))
        for queue in dict.fromkeys([qp.send_cq, peer.recv_cq] if peer else [qp.send_cq]):
            if queue.channel and dice.rarely(3):
                twins.request_notify(queue, solicited_only=dice.maybe())
        for _ in range(count):
            twins.post_send(qp, drawer.send(qp, peer, twins.new_wr_id(SEND_SIDE), opcodes))
