"""Random legal and illegal verbs against a plain model, over several contexts and both ways of execution.

After every step the device and the model agree on the contents of all memory, on the state of every queue pair, on
what is alive and what refuses to go; completions come per queue in the order and with the statuses that the model
says. Every run ends with every object destroyed.
"""

import sys
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aioverbs import Mtu, QpState, SendOpcode, VerbsError, WcStatus
from aioverbs._core import domains, engine
from aioverbs.attributes import QpCapabilities
from tests.core.allocators import Recording
from tests.core.contexts import open_context
from tests.core.drawing import Dice, Drawer
from tests.core.model import RECEIVE_SIDE, SEND_SIDE, Channel, Context, Node, Pd, Qp, Queue, Region, Td
from tests.core.pairs import ALL_ACCESS, to_init, to_rtr
from tests.core.twins import Twins
from tests.ledger import destroy_all

ONE_SIDED = [
    SendOpcode.RDMA_WRITE,
    SendOpcode.RDMA_READ,
    SendOpcode.ATOMIC_FETCH_AND_ADD,
    SendOpcode.ATOMIC_CMP_AND_SWP,
]
MESSAGES = [SendOpcode.SEND, SendOpcode.SEND_WITH_IMM, SendOpcode.RDMA_WRITE_WITH_IMM]
PSNS = [0, 0xFFFFFE, 0x123456]
MTUS = [Mtu.MTU_256, Mtu.MTU_512, Mtu.MTU_4096]

statuses: Counter[WcStatus] = Counter()
DATA = st.data()


def power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length() if at_least else 0


class Device(RuleBasedStateMachine):
    """Each rule does one thing to the twins; what it does it to is drawn from what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins()

    # ---- making

    @initialize(modes=st.lists(st.sampled_from(["inline", "engine"]), min_size=1, max_size=3), data=DATA)
    def begin(self, modes: list[str], data: st.DataObject) -> None:
        for mode in modes:
            self.open_context(mode)
        dice = Dice(data)
        for context in self.twins.of(Context):
            pd = self._make_pd(context)
            self._make_region(dice, pd, far=False)
            self._make_region(dice, pd, far=True)
            self._make_queue(context, None, None, 64, extended=False, single_threaded=False)
        for _ in range(2):
            self._make_qp(dice)
        self._connect(dice, *self.twins.of(Qp))

    def open_context(self, mode: str) -> None:
        self.twins.add(Context(mode=mode), open_context(mode))

    @precondition(lambda self: len(self.twins.of(Context)) < 3)
    @rule(mode=st.sampled_from(["inline", "engine"]))
    def open_another_context(self, mode: str) -> None:
        self.open_context(mode)

    def _make_pd(self, context: Context) -> Pd:
        pd = Pd((context,), context=context)
        self.twins.add(pd, engine.ProtectionDomain(self.twins.handle(context, engine.Context)))
        return pd

    @precondition(lambda self: self.twins.of(Context))
    @rule(data=DATA)
    def make_domains(self, data: st.DataObject) -> None:
        """A protection domain, a thread domain, and parent domains over what there is."""
        dice, twins = Dice(data), self.twins
        context = dice.pick(twins.of(Context))
        roots = [pd for pd in twins.of(Pd, context) if pd.base is None]
        match dice.below(4):
            case 0:
                self._make_pd(context)
            case 1:
                twins.add(Td((context,), context=context), domains.ThreadDomain(twins.handle(context, engine.Context)))
            case _ if roots:
                self._make_parent_domain(dice, dice.pick(roots))

    def _make_parent_domain(self, dice: Dice, base: Pd) -> None:
        twins = self.twins
        td = dice.pick([None, *twins.of(Td, base.context)])
        allocator = Recording() if dice.maybe() else None
        domain = Pd((base, td) if td else (base,), context=base.context, base=base, allocates=allocator is not None)
        handle = domains.ParentDomain(
            twins.handle(base, engine.ProtectionDomain),
            twins.handle(td, domains.ThreadDomain) if td else None,
            allocator,
        )
        twins.add(domain, handle)
        twins.allocators += [allocator] if allocator else []

    @precondition(lambda self: self.twins.of(Pd))
    @rule(data=DATA, far=st.booleans())
    def make_region(self, data: st.DataObject, far: bool) -> None:
        dice = Dice(data)
        self._make_region(dice, dice.pick(self.twins.of(Pd)), far)

    def _make_region(self, dice: Dice, pd: Pd, far: bool) -> None:
        """Over new memory, or over a part of what is registered already."""
        twins = self.twins
        known = [pair for pair in twins.memories if pair[0].far == far]
        buffer, memory = dice.pick(known) if known and dice.rarely(3) else twins.new_buffer(dice.pick([64, 300]), far)
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

    def _furnish(self, dice: Dice, pd: Pd, far: bool) -> None:
        """See that a domain has a region on that side."""
        regions = self.twins.of(Region)
        if not any(region.pd.root is pd.root and region.buffer.far == far for region in regions):
            self._make_region(dice, pd, far)

    @precondition(lambda self: self.twins.of(Context))
    @rule(data=DATA)
    def make_queue(self, data: st.DataObject) -> None:
        dice, twins = Dice(data), self.twins
        context = dice.pick(twins.of(Context))
        if dice.rarely(4):
            channel = Channel((context,), context=context)
            twins.add(channel, engine.CompletionChannel(twins.handle(context, engine.Context)))
        parents = [pd for pd in twins.of(Pd, context) if pd.base is not None]
        self._make_queue(
            context,
            dice.pick([None, *twins.of(Channel, context)]),
            dice.pick([None, *parents]),
            dice.pick([16, 50, 100]),
            extended=dice.maybe(),
            single_threaded=dice.maybe(),
        )

    def _make_queue(
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

    @precondition(lambda self: self.twins.of(Pd) and len(self.twins.of(Qp)) < 8)
    @rule(data=DATA)
    def make_queue_pair(self, data: st.DataObject) -> None:
        self._make_qp(Dice(data))

    def _make_qp(self, dice: Dice) -> None:
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

    # ---- states

    def _modify(self, dice: Dice, qp: Qp, state: QpState, peer: int, psns: tuple[int, int]) -> None:
        """Change a state with new attributes; or not, where the model says so."""
        twins, handle = self.twins, self.twins.qp(qp)
        twins.settle()
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

    def _connect(self, dice: Dice, *ends: Qp) -> None:
        """Take one or two queue pairs to RTS; with itself, with each other."""
        psns = [dice.pick(PSNS) for _ in ends]
        for qp, peer, own, other in zip(ends, reversed(ends), psns, reversed(psns), strict=True):
            for state in (QpState.RESET, QpState.INIT, QpState.RTR, QpState.RTS):
                self._modify(dice, qp, state, peer.number, (other, own))

    @precondition(lambda self: self.twins.of(Qp))
    @rule(data=DATA)
    def connect(self, data: st.DataObject) -> None:
        dice, qps = Dice(data), self.twins.of(Qp)
        near, far = dice.pick(qps), dice.pick(qps)
        self._connect(dice, *([near] if near is far else [near, far]))

    @precondition(lambda self: self.twins.of(Qp))
    @rule(
        data=DATA, state=st.sampled_from([state for state in QpState if state <= QpState.ERR and state != QpState.SQE])
    )
    def modify(self, data: st.DataObject, state: QpState) -> None:
        dice, qps = Dice(data), self.twins.of(Qp)
        psns = dice.pick(PSNS), dice.pick(PSNS)
        self._modify(dice, dice.pick(qps), state, dice.pick([*(qp.number for qp in qps), 1 << 23]), psns)

    @precondition(lambda self: self.twins.of(Qp))
    @rule(data=DATA)
    def resume(self, data: st.DataObject) -> None:
        self.twins.settle()
        qps = self.twins.of(Qp)
        qp = Dice(data).pick([qp for qp in qps if qp.state is QpState.SQD] or qps)
        error = 0
        try:
            self.twins.qp(qp).modify(QpState.RTS)
        except VerbsError as refusal:
            error = refusal.errno
        assert error == self.twins.fabric.resume(qp)
        self.twins.under_way = qp

    # ---- work

    def _sender(self, dice: Dice) -> Qp:
        """Mostly one that works: where there is none, connect some."""
        twins, qps = self.twins, self.twins.of(Qp)
        if dice.rarely(8):
            return dice.pick(qps)
        working = [qp for qp in qps if qp.state is QpState.RTS and twins.fabric.peer_of(qp)]
        if not working:
            near, far = dice.pick(qps), dice.pick(qps)
            self._connect(dice, *([near] if near is far else [near, far]))
            return near
        return dice.pick(working)

    def _post(self, dice: Dice, opcodes: list[SendOpcode]) -> None:
        """Post some requests to a queue pair, one behind the other, without waiting for them."""
        twins, qp = self.twins, self._sender(dice)
        drawer = Drawer(dice, twins.regions)
        count = dice.between(1, 4)
        peer = twins.fabric.qps.get(qp.peer)
        if not dice.rarely():
            self._furnish(dice, qp.pd, far=False)
            self._furnish(dice, peer.pd if peer else qp.pd, far=True)
        if peer and opcodes is not ONE_SIDED and not dice.rarely():
            for _ in range(count - len(peer.receives)):
                twins.post_recv(peer, drawer.receive(peer, twins.new_wr_id(RECEIVE_SIDE)))
        for _ in range(count):
            twins.post_send(qp, drawer.send(qp, peer, twins.new_wr_id(SEND_SIDE), opcodes))

    @precondition(lambda self: self.twins.of(Qp))
    @rule(data=DATA)
    def one_sided(self, data: st.DataObject) -> None:
        self._post(Dice(data), ONE_SIDED)

    @precondition(lambda self: self.twins.of(Qp))
    @rule(data=DATA)
    def messages(self, data: st.DataObject) -> None:
        self._post(Dice(data), MESSAGES)

    @precondition(lambda self: self.twins.of(Qp))
    @rule(data=DATA)
    def everything(self, data: st.DataObject) -> None:
        self._post(Dice(data), ONE_SIDED + MESSAGES)

    @precondition(lambda self: self.twins.of(Qp))
    @rule(data=DATA)
    def receives(self, data: st.DataObject) -> None:
        dice, twins = Dice(data), self.twins
        qp = dice.pick(twins.of(Qp))
        drawer = Drawer(dice, twins.regions)
        for _ in range(dice.between(1, 4)):
            twins.post_recv(qp, drawer.receive(qp, twins.new_wr_id(RECEIVE_SIDE)))

    @precondition(lambda self: self.twins.of(Queue))
    @rule(data=DATA, count=st.sampled_from([1, 2, 1000]))
    def poll(self, data: st.DataObject, count: int) -> None:
        self.twins.poll(Dice(data).pick(self.twins.of(Queue)), count)

    @precondition(lambda self: self.twins.memories)
    @rule(data=DATA, fill=st.binary(min_size=1, max_size=16))
    def write_from_here(self, data: st.DataObject, fill: bytes) -> None:
        """The user changes memory, too."""
        self.twins.settle()
        buffer, memory = Dice(data).pick(self.twins.memories)
        for content in (buffer.content, memory):
            content[:] = (fill * len(content))[: len(content)]

    # ---- events

    @precondition(lambda self: any(queue.channel for queue in self.twins.of(Queue)))
    @rule(data=DATA, solicited_only=st.booleans())
    def request_notify(self, data: st.DataObject, solicited_only: bool) -> None:
        self.twins.settle()
        queue = Dice(data).pick([queue for queue in self.twins.of(Queue) if queue.channel])
        self.twins.cq(queue).request_notify(solicited_only)
        queue.arm(solicited_only)

    @precondition(lambda self: self.twins.of(Channel))
    @rule(data=DATA)
    def take_event(self, data: st.DataObject) -> None:
        self.twins.take_event(Dice(data).pick(self.twins.of(Channel)))

    @precondition(lambda self: any(queue.taken for queue in self.twins.of(Queue)))
    @rule(data=DATA)
    def acknowledge(self, data: st.DataObject) -> None:
        dice = Dice(data)
        queue = dice.pick([queue for queue in self.twins.of(Queue) if queue.taken])
        count = dice.between(1, queue.taken)
        self.twins.cq(queue).ack_events(count)
        queue.taken -= count

    # ---- going

    @precondition(lambda self: self.twins.open)
    @rule(data=DATA)
    def destroy(self, data: st.DataObject) -> None:
        """Whatever it is: it goes, or refuses."""
        self.twins.destroy(Dice(data).pick(self.twins.open))

    @precondition(lambda self: any(not node.busy for node in self.twins.open))
    @rule(data=DATA)
    def destroy_a_leaf(self, data: st.DataObject) -> None:
        leaves: list[Node] = [node for node in self.twins.open if not node.busy]
        assert self.twins.destroy(Dice(data).pick(leaves))

    @precondition(lambda self: self.twins.closed)
    @rule(data=DATA)
    def use_what_is_closed(self, data: st.DataObject) -> None:
        self.twins.use_closed(Dice(data).pick(self.twins.closed))

    @invariant()
    def counts_agree(self) -> None:
        self.twins.compare_counts()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.twins.finish()
                statuses.update(expected.status for expected in self.twins.done)
        finally:
            destroy_all(engine.open_handles())


def test_device() -> None:
    statuses.clear()
    run_state_machine_as_test(
        Device,
        settings=settings(
            stateful_step_count=80,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )
    # It went where it should, and not only to what is refused.
    assert set(statuses) >= {
        WcStatus.SUCCESS,
        WcStatus.LOC_PROT_ERR,
        WcStatus.REM_ACCESS_ERR,
        WcStatus.REM_INV_REQ_ERR,
        WcStatus.RETRY_EXC_ERR,
        WcStatus.RNR_RETRY_EXC_ERR,
        WcStatus.WR_FLUSH_ERR,
    }
    assert ALL_ACCESS
