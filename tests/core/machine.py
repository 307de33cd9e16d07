"""Steps of the stateful test, each applied to the device and the model."""

from typing import Any

from hypothesis import note

from aioverbs import AccessFlags, EventType, Mtu, QpState, QpType, SendOpcode
from tests.core.drawing import Dice
from tests.core.drawing_requests import Aim, RequestDrawer
from tests.core.making import TYPES, Maker
from tests.core.model import AddressHandle, Context, Pd, Window, XrcDomain
from tests.core.model_datagrams import PORT_MTU
from tests.core.model_execution import CAN_SEND, LISTENING
from tests.core.model_queue_pairs import RECEIVE_SIDE, SEND_SIDE, Qp, Receive, SharedQueue
from tests.core.model_states import COUNTERPART, NEEDS
from tests.core.transports import QKEY, path_to_self
from tests.core.twins import errno_of

ONE_SIDED = [
    SendOpcode.RDMA_WRITE,
    SendOpcode.RDMA_READ,
    SendOpcode.ATOMIC_FETCH_AND_ADD,
    SendOpcode.ATOMIC_CMP_AND_SWP,
]
MESSAGES = [SendOpcode.SEND, SendOpcode.SEND_WITH_IMM, SendOpcode.RDMA_WRITE_WITH_IMM]
PSNS = [0, 0xFFFFFE, 0x123456]
MTUS = [Mtu.MTU_256, Mtu.MTU_512, Mtu.MTU_4096]


class Steps(Maker):
    """Steps that several rules share; their objects are drawn from the open ones."""

    # ---- Work

    def post_some_work(self, dice: Dice) -> None:
        """Post some work before most steps. Runs leave out random rules, and some of the rules are the only ones that
        post.
        """
        twins = self.twins
        if not twins.of(Context) or not dice.maybe():
            return
        if not twins.of(Pd):
            self.add_pd(dice.pick(twins.of(Context)))
        if len(twins.of(Qp)) < 2:
            self.add_qp_of_some_type(dice)
        if dice.rarely(4):
            self.post_window_requests(dice)
        else:
            self.post(dice, ONE_SIDED + MESSAGES)

    def add_qp_of_some_type(self, dice: Dice) -> Qp:
        kind = dice.pick(TYPES)
        return self.add_xrc_target(self.some_xrc_domain(dice)) if kind is QpType.XRC_RECV else self.add_qp(dice, kind)

    def some_xrc_domain(self, dice: Dice) -> XrcDomain:
        known = self.twins.of(XrcDomain)
        if known and not dice.rarely(8):
            return dice.pick(known)
        return self.add_xrc_domain(dice.pick(self.twins.of(Context)), of_file=dice.maybe())

    # ---- States

    def to_state(
        self, dice: Dice, qp: Qp, state: QpState, peer: int, psns: tuple[int, int], form: QpType | None = None
    ) -> None:
        """Change the state with new attributes, of this type or another; check that device and model agree."""
        twins, handle = self.twins, self.twins.qp(qp)
        twins.catch_up()
        if EventType.QP_LAST_WQE_REACHED in qp.events:
            twins.take_async_events(qp.context)  # a device thread may otherwise miss the event before the reset
        note(f"modify {handle} to {state.name}, peer {peer}, PSNs {psns}")
        access, mtu = dice.access(), dice.pick(MTUS)
        reads = 0 if dice.rarely(20) else 16
        qkey = QKEY + dice.below(2) * dice.rarely(4)
        values: dict[str, Any] = {
            "pkey_index": 0,
            "port_num": 1,
            "qp_access_flags": access,
            "qkey": qkey,
            "path_mtu": mtu,
            "dest_qp_num": peer,
            "rq_psn": psns[0],
            "av": path_to_self(handle.context),
            "max_dest_rd_atomic": reads,
            "min_rnr_timer": 1,
            "sq_psn": psns[1],
            "timeout": 1,
            "retry_cnt": 0,
            "rnr_retry": 0,
            "max_rd_atomic": reads,
        }
        names = NEEDS[form or qp.type].get(state, ())
        error = errno_of(lambda: handle.modify(state, **{name: values[name] for name in names}))
        assert error == twins.fabric.modify(qp, state, names)
        if not error:
            match state:
                case QpState.INIT:
                    qp.access, qp.qkey = access, qkey
                case QpState.RTR:
                    qp.peer, qp.expected_psn, qp.reads_served, qp.mtu = peer, psns[0], reads, mtu.size
                case QpState.RTS:
                    qp.next_psn, qp.reads = psns[1], reads
        twins.in_flight = qp

    def resume(self, qp: Qp) -> None:
        """Go to RTS without attributes."""
        self.twins.catch_up()
        error = errno_of(lambda: self.twins.qp(qp).modify(QpState.RTS))
        assert error == self.twins.fabric.resume(qp)
        self.twins.in_flight = qp

    def join(self, dice: Dice, *ends: Qp) -> None:
        """Take one queue pair (connected to itself) or two (to each other) to RTS; the second may stay in RTR."""
        psns = [dice.pick(PSNS) for _ in ends]
        for qp, peer, own, other in zip(ends, reversed(ends), psns, reversed(psns), strict=True):
            own = dice.pick(PSNS) if dice.rarely(20) else own  # wrong PSN: no answer
            ready = qp is ends[0] or not dice.rarely(3)
            for state in (QpState.RESET, QpState.INIT, QpState.RTR, QpState.RTS)[: 4 if ready else 3]:
                self.to_state(dice, qp, state, peer.number, (other, own))

    def join_with_some(self, dice: Dice, near: Qp) -> None:
        """Connect with a possible peer; an XRC sender needs another type, which is created if there is none."""
        fitting = [qp for qp in self.twins.of(Qp) if qp.type is COUNTERPART[near.type]]
        if not fitting:
            target = near.type is QpType.XRC_SEND
            fitting = [
                self.add_xrc_target(self.some_xrc_domain(dice)) if target else self.add_qp(dice, QpType.XRC_SEND)
            ]
        far = dice.pick(fitting)
        self.join(dice, *([near] if near is far else [near, far]))

    # ---- Senders and destinations

    def has_receiver(self, qp: Qp) -> bool:
        """Return whether a peer receives what the queue pair sends."""
        if qp.type is QpType.UD:
            return True  # itself
        return self.twins.fabric.connected_peer(qp) is not None

    def sender(self, dice: Dice) -> Qp:
        """Return a queue pair that is connected, connecting one if there is none; rarely any queue pair."""
        qps = self.twins.of(Qp)
        if dice.rarely(12):
            return dice.pick(qps)
        working = [qp for qp in qps if qp.state is QpState.RTS and qp.sends_at_all and self.has_receiver(qp)]
        if working and not dice.rarely(6):
            return dice.pick(working)
        near = dice.pick([qp for qp in qps if qp.sends_at_all] or qps)
        if near not in working:
            self.join_with_some(dice, near)
        return near

    def aim(self, dice: Dice, qp: Qp) -> Aim:
        """Return the destination of a queue pair's requests."""
        twins = self.twins
        peer = twins.fabric.qps.get(qp.peer)
        if qp.type is QpType.UD:
            others = [other for other in twins.of(Qp) if other.type is QpType.UD and other.state in LISTENING]
            peer = dice.pick(others) if others and not dice.rarely(30) else dice.pick(twins.of(Qp))
            return Aim(peer, peer.pd, peer.shared, self.some_address_handle(dice, qp))
        if qp.type is QpType.XRC_SEND and peer and peer.xrc_domain:
            shared = self.some_shared(dice, peer.xrc_domain)
            return Aim(peer, shared.pd, shared)
        return Aim(peer, peer.pd, peer.shared) if peer else Aim(None, qp.pd)

    def some_address_handle(self, dice: Dice, qp: Qp) -> AddressHandle:
        """Return an address handle of its own domain, or rarely of another."""
        address_handles, from_elsewhere = self.twins.of(AddressHandle, qp.context), dice.rarely(8)
        fitting = [ah for ah in address_handles if (ah.pd.root is not qp.pd.root) == from_elsewhere]
        if fitting:
            return dice.pick(fitting)
        return self.add_address_handle(dice, self.add_pd(qp.context) if from_elsewhere else qp.pd)

    def some_shared(self, dice: Dice, xrc_domain: XrcDomain) -> SharedQueue:
        """Return a shared queue that targets of the domain reach, in any context, or rarely another one."""
        twins, from_elsewhere = self.twins, dice.rarely(20)
        fitting = [
            shared
            for shared in twins.of(SharedQueue)
            if shared.xrc_domain and (shared.xrc_domain.identity is not xrc_domain.identity) == from_elsewhere
        ]
        if fitting:
            return dice.pick(fitting)
        context = xrc_domain.context
        pds = twins.of(Pd, context) or [self.add_pd(context)]
        return self.add_shared(
            dice, dice.pick(pds), self.add_xrc_domain(context, of_file=False) if from_elsewhere else xrc_domain
        )

    # ---- Posting

    def drawer(self, dice: Dice) -> RequestDrawer:
        return RequestDrawer(dice, self.twins.regions, self.twins.of(Window))

    def post(self, dice: Dice, opcodes: list[SendOpcode]) -> None:
        self.post_to(dice, self.sender(dice), opcodes)

    def post_to(self, dice: Dice, qp: Qp, opcodes: list[SendOpcode]) -> None:
        """Post some requests to a queue pair, one behind the other, without waiting for them."""
        twins = self.twins
        aim = self.aim(dice, qp)
        count = dice.between(1, 4)
        if not dice.rarely():
            self.ensure_region(dice, qp.pd, far=False)
            self.ensure_region(dice, aim.pd, far=True)
        if opcodes is not ONE_SIDED and not dice.rarely(8):
            self.post_receives(dice, aim.shared or aim.peer, count)
        for queue in dict.fromkeys([qp.send_cq, aim.queue]):
            if queue and queue.channel and dice.rarely(3):
                twins.request_notify(queue, solicited_only=dice.maybe())
        drawer = self.drawer(dice)
        for _ in range(count):
            twins.post_send(qp, drawer.send(qp, aim, twins.new_wr_id(SEND_SIDE), opcodes))

    def post_receives(self, dice: Dice, to: Qp | SharedQueue | None, wanted: int) -> None:
        """Post receives until `wanted` are waiting."""
        twins, drawer = self.twins, self.drawer(dice)
        if to is None:
            return
        for _ in range(wanted - len(to.receives)):
            if isinstance(to, SharedQueue):
                twins.post_shared(to, drawer.receive(to.pd, to.max_sge, twins.new_wr_id(RECEIVE_SIDE)))
            else:
                receive = drawer.receive(to.pd, to.capabilities.max_recv_sge, twins.new_wr_id(RECEIVE_SIDE))
                twins.post_recv(to, receive)

    def post_large(self, dice: Dice, qp: Qp) -> None:
        """Post a datagram about as large as the port's MTU, to a receiver with room for more."""
        twins = self.twins
        aim, drawer = self.aim(dice, qp), self.drawer(dice)
        if aim.pd not in twins.open:
            return
        near = self.add_region(dice, qp.pd, far=False, large=True)
        far = self.add_region(dice, aim.pd, far=True, large=True)
        receive = Receive(twins.new_wr_id(RECEIVE_SIDE), [(far.address, far.length, far.key)])
        if aim.shared:
            twins.post_shared(aim.shared, receive)
        elif aim.peer:
            twins.post_recv(aim.peer, receive)
        sge = near.address, PORT_MTU + dice.below(2), near.key
        twins.post_send(qp, drawer.datagram(qp, aim, twins.new_wr_id(SEND_SIDE), sge))

    # ---- Windows

    def post_window_requests(self, dice: Dice) -> None:
        """Bind or unbind a window that requests of a working queue pair may use, and post such requests."""
        twins = self.twins
        qp = self.sender(dice)
        peer = twins.fabric.qps.get(qp.peer)
        opener = qp
        if peer and peer.state is QpState.RTS and SendOpcode.BIND_MW in CAN_SEND[peer.type]:
            opener = peer
        if not opener.sends_at_all:
            return
        if not dice.rarely():
            self.ensure_region(dice, opener.pd, far=True, access=AccessFlags.MW_BIND)
        windows = twins.of(Window, opener.context)
        fitting = [window for window in windows if window.pd.root is opener.pd.root]
        if windows and dice.rarely(40):
            window = dice.pick(windows)
        elif fitting and not dice.rarely(4):
            window = dice.pick(fitting)
        else:
            window = self.add_window(opener.pd, second=dice.maybe())
        drawer = self.drawer(dice)
        twins.post_send(opener, drawer.window_request(opener, window, twins.new_wr_id(SEND_SIDE)))
        if not dice.rarely(4):
            self.post_to(dice, qp, ONE_SIDED + MESSAGES)
        if window.region and dice.rarely(4):
            assert not twins.destroy(window.region)
            twins.fabric.memory.coverage["kept by a window"] += 1
