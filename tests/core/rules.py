"""Rules of the stateful test: valid and invalid calls of a user at any moment."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from aioverbs import QpState, QpType
from tests.core.drawing import Dice, dice
from tests.core.machine import MESSAGES, ONE_SIDED, PSNS, Steps
from tests.core.making import SENDERS
from tests.core.model import AddressHandle, Channel, Context, Pd, Queue, Td, XrcDomain
from tests.core.model_queue_pairs import Qp, SharedQueue
from tests.core.model_states import NEEDS
from tests.core.twins import errno_of

DICE = dice()


class Rules(Steps):
    """Each rule applies one step to the device and the model; its object is drawn from the open ones."""

    # ---- Creation

    @initialize(
        modes=st.lists(st.sampled_from(["inline", "thread"]), min_size=1, max_size=3),
        kind=st.sampled_from(SENDERS),
        dice=DICE,
    )
    def begin(self, modes: list[str], kind: QpType, dice: Dice) -> None:
        for mode in modes:
            self.open_context(mode)
        for context in self.twins.of(Context):
            pd = self.add_pd(context)
            self.add_region(dice, pd, far=False)
            self.add_region(dice, pd, far=True)
            domain = None
            if dice.maybe():
                td = self.add_td(context) if dice.maybe() else None
                domain = self.add_parent_domain(dice, pd, td)
            channel = self.add_channel(context)
            self.add_queue(context, channel, domain, 64, extended=dice.maybe(), single_threaded=False)
        for _ in range(2):
            self.join_with_some(dice, self.add_qp(dice, kind))

    @precondition(lambda self: len(self.twins.of(Context)) < 3)
    @rule(mode=st.sampled_from(["inline", "thread"]))
    def open_another_context(self, mode: str) -> None:
        self.open_context(mode)

    @precondition(lambda self: self.twins.of(Context))
    @rule(dice=DICE)
    def make_domains(self, dice: Dice) -> None:
        """Create a protection domain, a thread domain, an XRC domain, or a parent domain."""
        self.post_some_work(dice)
        twins = self.twins
        context = dice.pick(twins.of(Context))
        roots = [pd for pd in twins.of(Pd, context) if pd.base is None]
        match dice.below(5):
            case 0:
                self.add_pd(context)
            case 1:
                self.add_td(context)
            case 2:
                self.add_xrc_domain(context, of_file=dice.maybe())
            case _ if roots:
                self.add_parent_domain(dice, dice.pick(roots), dice.pick([None, *twins.of(Td, context)]))

    @precondition(lambda self: self.twins.of(Pd))
    @rule(dice=DICE, far=st.booleans())
    def make_region(self, dice: Dice, far: bool) -> None:
        self.post_some_work(dice)
        self.add_region(dice, dice.pick(self.twins.of(Pd)), far)

    @precondition(lambda self: self.twins.of(Context))
    @rule(dice=DICE)
    def make_queue(self, dice: Dice) -> None:
        self.post_some_work(dice)
        twins = self.twins
        context = dice.pick(twins.of(Context))
        if dice.rarely(4):
            self.add_channel(context)
        parents = [pd for pd in twins.of(Pd, context) if pd.base is not None]
        self.add_queue(
            context,
            dice.pick([None, *twins.of(Channel, context)]),
            dice.pick([None, *parents]),
            dice.pick([16, 50, 100]),
            extended=dice.maybe(),
            single_threaded=dice.maybe(),
        )

    @precondition(lambda self: self.twins.of(Pd) and len(self.twins.of(Qp)) < 8)
    @rule(dice=DICE)
    def make_queue_pair(self, dice: Dice) -> None:
        self.post_some_work(dice)
        self.add_qp_of_some_type(dice)

    @precondition(lambda self: self.twins.of(Pd) and len(self.twins.of(SharedQueue)) < 4)
    @rule(dice=DICE)
    def make_shared_queue(self, dice: Dice) -> None:
        self.post_some_work(dice)
        pd = dice.pick(self.twins.of(Pd))
        xrc_domains = self.twins.of(XrcDomain, pd.context)
        self.add_shared(dice, pd, dice.pick([None, *xrc_domains]))

    @precondition(lambda self: self.twins.of(Pd) and len(self.twins.of(AddressHandle)) < 4)
    @rule(dice=DICE)
    def make_way(self, dice: Dice) -> None:
        self.post_some_work(dice)
        self.add_address_handle(dice, dice.pick(self.twins.of(Pd)))

    # ---- States

    @precondition(lambda self: self.twins.of(Qp))
    @rule(dice=DICE)
    def connect(self, dice: Dice) -> None:
        self.post_some_work(dice)
        self.join_with_some(dice, dice.pick(self.twins.of(Qp)))

    @precondition(lambda self: self.twins.of(Qp))
    @rule(dice=DICE, state=st.sampled_from([state for state in QpState if state <= QpState.ERR]))
    def modify(self, dice: Dice, state: QpState) -> None:
        """Change the state of any queue pair, to any peer, sometimes with the attributes of another type."""
        self.post_some_work(dice)
        qps = self.twins.of(Qp)
        qp, psns = dice.pick(qps), (dice.pick(PSNS), dice.pick(PSNS))
        form = dice.pick(list(NEEDS)) if dice.rarely(4) else qp.type
        self.to_state(dice, qp, state, dice.pick([*(qp.number for qp in qps), 1 << 23]), psns, form)

    @precondition(lambda self: self.twins.of(Qp))
    @rule(dice=DICE)
    def go_on(self, dice: Dice) -> None:
        self.post_some_work(dice)
        qps = self.twins.of(Qp)
        self.resume(dice.pick([qp for qp in qps if qp.state in (QpState.SQD, QpState.SQE)] or qps))

    # ---- Work

    @precondition(lambda self: self.twins.of(Qp))
    @rule(dice=DICE)
    def one_sided(self, dice: Dice) -> None:
        self.post(dice, ONE_SIDED)

    @precondition(lambda self: self.twins.of(Qp))
    @rule(dice=DICE)
    def messages(self, dice: Dice) -> None:
        self.post(dice, MESSAGES)

    @precondition(lambda self: any(qp.state is QpState.RTS for qp in self.twins.of(Qp)))
    @rule(dice=DICE)
    def hold(self, dice: Dice) -> None:
        """Post requests that wait in SQD for `go_on` or their flush."""
        self.post_some_work(dice)
        twins = self.twins
        qp = dice.pick([qp for qp in twins.of(Qp) if qp.state is QpState.RTS] or twins.of(Qp))
        self.to_state(dice, qp, QpState.SQD, 0, (0, 0))
        self.post_to(dice, qp, ONE_SIDED + MESSAGES)

    @precondition(lambda self: any(qp.type is QpType.UD for qp in self.twins.of(Qp)))
    @rule(dice=DICE)
    def large_datagram(self, dice: Dice) -> None:
        self.post_some_work(dice)
        twins = self.twins
        qp = dice.pick([qp for qp in twins.of(Qp) if qp.type is QpType.UD])
        if qp.state is not QpState.RTS and not dice.rarely():
            self.join_with_some(dice, qp)
        self.post_large(dice, qp)

    @precondition(lambda self: self.twins.of(Qp))
    @rule(dice=DICE)
    def everything(self, dice: Dice) -> None:
        self.post(dice, ONE_SIDED + MESSAGES)

    @precondition(lambda self: self.twins.of(Qp))
    @rule(dice=DICE)
    def receives(self, dice: Dice) -> None:
        self.post_some_work(dice)
        qp = dice.pick(self.twins.of(Qp))
        self.post_receives(dice, qp, len(qp.receives) + dice.between(1, 4))

    @precondition(lambda self: self.twins.of(SharedQueue))
    @rule(dice=DICE)
    def shared_receives(self, dice: Dice) -> None:
        self.post_some_work(dice)
        shared = dice.pick(self.twins.of(SharedQueue))
        self.post_receives(dice, shared, len(shared.receives) + dice.between(1, 4))

    @precondition(lambda self: self.twins.of(SharedQueue))
    @rule(dice=DICE, depth=st.sampled_from([None, 1, 4, 8]), limit=st.sampled_from([None, 0, 1, 3, 6, 9]))
    def modify_shared(self, dice: Dice, depth: int | None, limit: int | None) -> None:
        """Change its depth, within the room of its completion queues, and its limit."""
        self.post_some_work(dice)
        self.twins.catch_up()
        shared = dice.pick(self.twins.of(SharedQueue))
        depth = min(depth, shared.largest) if depth else None
        error = errno_of(lambda: self.twins.srq(shared).modify(depth, limit))
        assert error == self.twins.fabric.resize_shared(shared, depth, limit)

    @precondition(lambda self: self.twins.of(Qp))
    @rule(dice=DICE)
    def windows(self, dice: Dice) -> None:
        self.post_some_work(dice)
        self.post_window_requests(dice)

    @precondition(lambda self: self.twins.of(Queue))
    @rule(dice=DICE, count=st.sampled_from([1, 2, 1000]))
    def poll(self, dice: Dice, count: int) -> None:
        self.post_some_work(dice)
        self.twins.catch_up()
        self.twins.poll(dice.pick(self.twins.of(Queue)), count)

    @precondition(lambda self: self.twins.of(Queue))
    @rule(dice=DICE)
    def poll_while_it_works(self, dice: Dice) -> None:
        self.post_some_work(dice)
        self.twins.poll_while_it_works(dice.pick(self.twins.of(Queue)))

    @precondition(lambda self: self.twins.memories)
    @rule(dice=DICE, fill=st.binary(min_size=1, max_size=16))
    def write_from_here(self, dice: Dice, fill: bytes) -> None:
        """The user changes memory, too."""
        self.post_some_work(dice)
        self.twins.catch_up()
        buffer, memory = dice.pick(self.twins.memories)
        for content in (buffer.content, memory):
            content[:] = (fill * len(content))[: len(content)]

    # ---- Events

    @precondition(lambda self: any(queue.channel for queue in self.twins.of(Queue)))
    @rule(dice=DICE, solicited_only=st.booleans())
    def request_notify(self, dice: Dice, solicited_only: bool) -> None:
        self.post_some_work(dice)
        queue = dice.pick([queue for queue in self.twins.of(Queue) if queue.channel])
        self.twins.request_notify(queue, solicited_only)

    @precondition(lambda self: self.twins.of(Channel))
    @rule(dice=DICE)
    def take_events(self, dice: Dice) -> None:
        self.post_some_work(dice)
        self.twins.take_events(dice.pick(self.twins.of(Channel)))

    @precondition(lambda self: any(queue.unacknowledged for queue in self.twins.of(Queue)))
    @rule(dice=DICE)
    def acknowledge(self, dice: Dice) -> None:
        self.post_some_work(dice)
        queue = dice.pick([queue for queue in self.twins.of(Queue) if queue.unacknowledged])
        count = dice.between(1, queue.unacknowledged)
        self.twins.cq(queue).ack_events(count)
        queue.unacknowledged -= count

    @precondition(lambda self: self.twins.of(Context))
    @rule(dice=DICE)
    def async_events(self, dice: Dice) -> None:
        """Read events and acknowledge some; an unacknowledged event keeps its object from being destroyed."""
        self.post_some_work(dice)
        self.twins.take_async_events(dice.pick(self.twins.of(Context)))
        while self.twins.async_events and not dice.rarely(3):
            self.twins.acknowledge_async_event(dice.below(len(self.twins.async_events)))

    # ---- Destroying

    @precondition(lambda self: self.twins.open)
    @rule(dice=DICE)
    def destroy(self, dice: Dice) -> None:
        """Destroy any object, or check that it refuses."""
        self.post_some_work(dice)
        self.twins.destroy(dice.pick(self.twins.open))

    @precondition(lambda self: any(not node.busy for node in self.twins.open))
    @rule(dice=DICE)
    def destroy_a_leaf(self, dice: Dice) -> None:
        self.post_some_work(dice)
        leaves = [node for node in self.twins.open if not node.busy]
        assert self.twins.destroy(dice.pick(leaves))

    @precondition(lambda self: self.twins.closed)
    @rule(dice=DICE)
    def use_what_is_closed(self, dice: Dice) -> None:
        self.post_some_work(dice)
        self.twins.check_closed(dice.pick(self.twins.closed))
