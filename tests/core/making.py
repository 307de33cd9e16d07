"""Object creation in the stateful test: each object of the device with its counterpart in the model."""

from hypothesis.stateful import RuleBasedStateMachine

from aioverbs import AccessFlags, MwType, QpType
from aioverbs._core.handles import handles, parent_domain
from aioverbs.attributes import AddressVector, QpCapabilities
from tests.core.allocators import Recording
from tests.core.contexts import open_context
from tests.core.drawing import LARGE, MESSAGE, Dice
from tests.core.model import NOTHING, AddressHandle, Channel, Context, Pd, Queue, Region, Td, Window, XrcDomain
from tests.core.model_queue_pairs import Qp, SharedQueue
from tests.core.twins import Twins

NOWHERE = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1])
SENDERS = [QpType.RC, QpType.UC, QpType.UD, QpType.XRC_SEND]
RECEIVERS = [QpType.RC, QpType.UC, QpType.UD, QpType.XRC_RECV]
TYPES = [*SENDERS, QpType.RC, QpType.XRC_RECV]


def power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length() if at_least else 0


class Maker(RuleBasedStateMachine):
    """Steps that create objects; parents are drawn from the open objects."""

    def __init__(self) -> None:
        super().__init__()
        self.twins = Twins()

    # ---- Domains

    def open_context(self, mode: str) -> None:
        self.twins.add(Context(mode=mode), open_context(mode))

    def add_pd(self, context: Context) -> Pd:
        pd = Pd((context,), context=context)
        self.twins.add(pd, handles.ProtectionDomain(self.twins.handle(context, handles.Context)))
        return pd

    def add_td(self, context: Context) -> Td:
        td = Td((context,), context=context)
        self.twins.add(td, parent_domain.ThreadDomain(self.twins.handle(context, handles.Context)))
        return td

    def add_parent_domain(self, dice: Dice, base: Pd, td: Td | None) -> Pd:
        twins = self.twins
        allocator = Recording() if dice.maybe() else None
        domain = Pd((base, td) if td else (base,), context=base.context, base=base, allocates=allocator is not None)
        handle = parent_domain.ParentDomain(
            twins.handle(base, handles.ProtectionDomain),
            twins.handle(td, parent_domain.ThreadDomain) if td else None,
            allocator,
        )
        twins.add(domain, handle)
        twins.allocators += [allocator] if allocator else []
        return domain

    def add_xrc_domain(self, context: Context, of_file: bool) -> XrcDomain:
        """Add an XRC domain; domains of the same file are one domain as long as one of them is open."""
        twins = self.twins
        same = [domain for domain in twins.of(XrcDomain) if domain.of_file] if of_file else []
        domain = XrcDomain((context,), context=context, of_file=of_file)
        if same:
            domain.identity = same[0].identity
        handle = parent_domain.XrcDomain(twins.handle(context, handles.Context), twins.file if of_file else -1)
        twins.add(domain, handle)
        return domain

    # ---- Memory

    def add_region(self, dice: Dice, pd: Pd, far: bool, *, large: bool = False) -> Region:
        """Register new memory, or a part of memory that is registered already."""
        twins = self.twins
        size = LARGE if large else dice.pick([MESSAGE + 30, 1000])
        known = [pair for pair in twins.memories if pair[0].far == far and len(pair[1]) >= size]
        if known and dice.rarely(3):
            buffer, memory = dice.pick(known)
        else:
            buffer, memory = twins.new_buffer(size, far)
        offset = dice.pick([0, 0, 8, 17])
        length = len(memory) - offset - dice.pick([0, 0, 5])
        access = dice.access()
        if not dice.rarely(4):
            access |= AccessFlags.MW_BIND
        handle = handles.MemoryRegion(
            twins.handle(pd, handles.ProtectionDomain), memoryview(memory)[offset : offset + length], access
        )
        region = Region((pd,), 0, True, pd.context, pd, buffer, offset, length, access, handle.lkey)
        assert handle.address == region.address
        twins.add(region, handle)
        twins.regions.append(region)
        twins.fabric.memory.add(region, region.key)
        return region

    def ensure_region(self, dice: Dice, pd: Pd, far: bool, access: AccessFlags = NOTHING) -> None:
        """Register a region on that side unless the domain has one, if the domain is open."""
        if pd not in self.twins.open:
            return
        regions = [region for region in self.twins.of(Region) if region.access & access == access]
        if not any(region.pd.root is pd.root and region.buffer.far == far for region in regions):
            self.add_region(dice, pd, far)

    def add_window(self, pd: Pd, second: bool) -> Window:
        twins = self.twins
        kind = MwType.TYPE_2 if second else MwType.TYPE_1
        handle = handles.MemoryWindow(twins.handle(pd, handles.ProtectionDomain), kind)
        window = Window((pd,), context=pd.context, pd=pd, second=second, posted_rkey=handle.rkey, key=handle.rkey)
        twins.add(window, handle)
        twins.fabric.memory.add(window, window.key)
        return window

    # ---- Completions

    def add_channel(self, context: Context) -> Channel:
        channel = Channel((context,), context=context)
        self.twins.add(channel, handles.CompletionChannel(self.twins.handle(context, handles.Context)))
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
    ) -> Queue:
        twins = self.twins
        handle = handles.CompletionQueue(
            twins.handle(context, handles.Context),
            cqe,
            twins.handle(channel, handles.CompletionChannel) if channel else None,
            extended=extended,
            parent_domain=twins.handle(domain, handles.ProtectionDomain) if domain else None,
            single_threaded=single_threaded,
        )
        parents = tuple(parent for parent in (context, channel, domain) if parent)
        assert handle.cqe == power_of_two(cqe)
        queue = Queue(parents, context=context, size=handle.cqe, channel=channel, domain=domain)
        twins.add(queue, handle)
        if domain and domain.allocates:
            domain.held += 2
        return queue

    def queue_with_room(self, dice: Dice, context: Context, depth: int) -> Queue:
        """Return a queue with room for `depth` more completions, or create one."""
        roomy = [queue for queue in self.twins.of(Queue, context) if queue.available >= depth]
        if roomy:
            return dice.pick(roomy)
        return self.add_queue(context, None, None, 100, extended=dice.maybe(), single_threaded=False)

    # ---- Queues

    def add_shared(self, dice: Dice, pd: Pd, xrc_domain: XrcDomain | None) -> SharedQueue:
        twins = self.twins
        depth, max_sge = dice.pick([4, 8, 7, 1]) if dice.rarely(4) else 8, dice.between(1, 3)
        cq = self.queue_with_room(dice, pd.context, power_of_two(depth)) if xrc_domain else None
        granted = power_of_two(depth)
        limit = min(dice.pick([0, 3, 8]), granted)
        handle = handles.SharedReceiveQueue(
            twins.handle(pd, handles.ProtectionDomain),
            depth,
            max_sge,
            limit,
            xrc_domain=twins.handle(xrc_domain, parent_domain.XrcDomain) if xrc_domain else None,
            cq=twins.cq(cq) if cq else None,
        )
        shared = SharedQueue(
            tuple(parent for parent in (pd, xrc_domain, cq) if parent),
            context=pd.context,
            pd=pd,
            depth=granted,
            largest=granted,
            max_sge=max_sge,
            limit=limit,
            xrc_domain=xrc_domain,
            cq=cq,
            number=handle.number if xrc_domain else 0,
        )
        twins.add(shared, handle)
        if cq:
            cq.reserved += granted
            assert shared.number not in twins.fabric.shared
            twins.fabric.shared[shared.number] = shared
        pd.held += 2 * pd.allocates
        return shared

    def add_address_handle(self, dice: Dice, pd: Pd) -> AddressHandle:
        """Add an address handle, by IPv4 or IPv6 addresses or one of each; rarely to an address that no device has."""
        twins = self.twins
        context = twins.handle(pd.context, handles.Context)
        source = dice.below(2)
        index = 1 - source if dice.rarely(8) else source
        target = NOWHERE if dice.rarely(20) else context.query_gid(1, index)
        labels = dice.pick([(0, 64, 0), (0x5A, 9, 0x12345), (0xFF, 255, 0xFFFFF)])
        traffic_class, hop_limit, flow_label = labels
        vector = AddressVector(
            target, sgid_index=source, traffic_class=traffic_class, hop_limit=hop_limit, flow_label=flow_label
        )
        ah = AddressHandle(
            (pd,),
            context=pd.context,
            pd=pd,
            source=context.query_gid(1, source),
            target=target,
            traffic_class=traffic_class,
            hop_limit=hop_limit,
            flow_label=flow_label,
            reaches_device=target != NOWHERE,
        )
        twins.add(ah, handles.AddressHandle(twins.handle(pd, handles.ProtectionDomain), vector))
        return ah

    def add_xrc_target(self, xrc_domain: XrcDomain) -> Qp:
        """Add an XRC target, which has no queues: requests name the shared receive queue."""
        handle = handles.QueuePair(
            xrc_domain=self.twins.handle(xrc_domain, parent_domain.XrcDomain), qp_type=QpType.XRC_RECV
        )
        assert handle.capabilities == QpCapabilities(0, 0, 0, 0, 0)
        qp = Qp(
            (xrc_domain,),
            context=xrc_domain.context,
            type=QpType.XRC_RECV,
            xrc_domain=xrc_domain,
            capabilities=handle.capabilities,
        )
        return self._register(qp, handle)

    def _register(self, qp: Qp, handle: handles.QueuePair) -> Qp:
        qp.number = handle.qp_num
        assert qp.number not in self.twins.fabric.qps
        self.twins.add(qp, handle)
        self.twins.fabric.qps[qp.number] = qp
        for queue in qp.queues:
            queue.reserved += qp.may_complete(queue)
        qp.pd.held += 2 * qp.pd.allocates
        return qp

    def add_qp(self, dice: Dice, kind: QpType) -> Qp:
        """Add a queue pair that sends, preferably on a domain with memory."""
        twins = self.twins
        registered = {region.pd.root for region in twins.of(Region)}
        pds = twins.of(Pd) or [self.add_pd(dice.pick(twins.of(Context)))]
        useful = [pd for pd in pds if pd.root in registered]
        pd = dice.pick(useful if useful and not dice.rarely() else pds)
        wanted = QpCapabilities(
            max_send_wr=dice.pick([4, 8, 7, 1, 0]) if dice.rarely(4) else 8,
            max_recv_wr=dice.pick([4, 8, 7, 1, 0]) if dice.rarely(4) else 8,
            max_send_sge=0 if dice.rarely(20) else dice.between(1, 3),
            max_recv_sge=0 if dice.rarely(20) else dice.between(1, 3),
            max_inline_data=dice.pick([64, 32, 0]),
        )
        shared = None
        if kind is not QpType.XRC_SEND and dice.rarely(3):
            basic = [shared for shared in twins.of(SharedQueue, pd.context) if not shared.xrc_domain]
            owner = self.add_pd(pd.context) if dice.rarely(4) else pd
            shared = dice.pick(basic) if basic and dice.maybe() else self.add_shared(dice, owner, None)
        depth = power_of_two(wanted.max_send_wr) + (shared.largest if shared else power_of_two(wanted.max_recv_wr))
        send_cq = self.queue_with_room(dice, pd.context, depth)
        recv_cq = None if kind is QpType.XRC_SEND else self.queue_with_room(dice, pd.context, depth)
        sig_all = dice.rarely(4)
        handle = handles.QueuePair(
            twins.handle(pd, handles.ProtectionDomain),
            twins.cq(send_cq),
            twins.cq(recv_cq) if recv_cq else None,
            wanted,
            qp_type=kind,
            sq_sig_all=sig_all,
            srq=twins.srq(shared) if shared else None,
        )
        own = kind is not QpType.XRC_SEND and not shared
        granted = handle.capabilities
        assert granted.max_send_wr == power_of_two(wanted.max_send_wr)
        assert granted.max_recv_wr == (power_of_two(wanted.max_recv_wr) if own else 0)
        assert granted.max_inline_data >= wanted.max_inline_data
        qp = Qp(
            tuple(parent for parent in (pd, send_cq, recv_cq, shared) if parent),
            context=pd.context,
            type=kind,
            pd=pd,
            send_cq=send_cq,
            recv_cq=recv_cq,
            shared=shared,
            capabilities=granted,
            sig_all=sig_all,
        )
        return self._register(qp, handle)
