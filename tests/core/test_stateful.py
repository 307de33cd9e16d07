"""Random legal and illegal verbs against a plain model, over several contexts and both ways of execution.

After every step the device and the model agree on the contents of all memory, on the state of every queue pair, on
what is alive and what refuses to go; completions come per queue in the order and with the statuses that the model
says. Every run ends with every object destroyed.
"""

import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aioverbs import QpState, VerbsError, WcStatus
from aioverbs._core import engine
from tests.core.drawing import Dice, Drawer, dice
from tests.core.machine import MESSAGES, ONE_SIDED, PSNS, Bench
from tests.core.model import RECEIVE_SIDE, Channel, Context, Pd, Qp, Queue, Td
from tests.ledger import destroy_all

statuses: Counter[WcStatus] = Counter()
DICE = dice()


class Device(Bench):
    """Each rule does one thing to the twins; what it does it to is drawn from what there is."""

    # ---- making

    @initialize(modes=st.lists(st.sampled_from(["inline", "engine"]), min_size=1, max_size=3), dice=DICE)
    def begin(self, modes: list[str], dice: Dice) -> None:
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
            self.add_qp(dice)
        self.join(dice, *self.twins.of(Qp))

    @precondition(lambda self: len(self.twins.of(Context)) < 3)
    @rule(mode=st.sampled_from(["inline", "engine"]))
    def open_another_context(self, mode: str) -> None:
        self.open_context(mode)

    @precondition(lambda self: self.twins.of(Context))
    @rule(dice=DICE)
    def make_domains(self, dice: Dice) -> None:
        """A protection domain, a thread domain, and parent domains over what there is."""
        self.work(dice)
        twins = self.twins
        context = dice.pick(twins.of(Context))
        roots = [pd for pd in twins.of(Pd, context) if pd.base is None]
        match dice.below(4):
            case 0:
                self.add_pd(context)
            case 1:
                self.add_td(context)
            case _ if roots:
                self.add_parent_domain(dice, dice.pick(roots), dice.pick([None, *twins.of(Td, context)]))

    @precondition(lambda self: self.twins.of(Pd))
    @rule(dice=DICE, far=st.booleans())
    def make_region(self, dice: Dice, far: bool) -> None:
        self.work(dice)
        self.add_region(dice, dice.pick(self.twins.of(Pd)), far)

    @precondition(lambda self: self.twins.of(Context))
    @rule(dice=DICE)
    def make_queue(self, dice: Dice) -> None:
        self.work(dice)
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
        self.work(dice)
        self.add_qp(dice)

    # ---- states

    @precondition(lambda self: self.twins.of(Qp))
    @rule(dice=DICE)
    def connect(self, dice: Dice) -> None:
        self.work(dice)
        qps = self.twins.of(Qp)
        near, far = dice.pick(qps), dice.pick(qps)
        self.join(dice, *([near] if near is far else [near, far]))

    @precondition(lambda self: self.twins.of(Qp))
    @rule(
        dice=DICE, state=st.sampled_from([state for state in QpState if state <= QpState.ERR and state != QpState.SQE])
    )
    def modify(self, dice: Dice, state: QpState) -> None:
        self.work(dice)
        qps = self.twins.of(Qp)
        psns = dice.pick(PSNS), dice.pick(PSNS)
        self.to_state(dice, dice.pick(qps), state, dice.pick([*(qp.number for qp in qps), 1 << 23]), psns)

    @precondition(lambda self: self.twins.of(Qp))
    @rule(dice=DICE)
    def resume(self, dice: Dice) -> None:
        self.work(dice)
        self.twins.settle()
        qps = self.twins.of(Qp)
        qp = dice.pick([qp for qp in qps if qp.state is QpState.SQD] or qps)
        error = 0
        try:
            self.twins.qp(qp).modify(QpState.RTS)
        except VerbsError as refusal:
            error = refusal.errno
        assert error == self.twins.fabric.resume(qp)
        self.twins.under_way = qp

    # ---- work

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
        """Requests that wait in SQD, for `resume` or their flush."""
        self.work(dice)
        twins = self.twins
        qp = dice.pick([qp for qp in twins.of(Qp) if qp.state is QpState.RTS] or twins.of(Qp))
        self.to_state(dice, qp, QpState.SQD, 0, (0, 0))
        self.post_to(dice, qp, ONE_SIDED + MESSAGES)

    @precondition(lambda self: self.twins.of(Qp))
    @rule(dice=DICE)
    def everything(self, dice: Dice) -> None:
        self.post(dice, ONE_SIDED + MESSAGES)

    @precondition(lambda self: self.twins.of(Qp))
    @rule(dice=DICE)
    def receives(self, dice: Dice) -> None:
        self.work(dice)
        twins = self.twins
        qp = dice.pick(twins.of(Qp))
        drawer = Drawer(dice, twins.regions)
        for _ in range(dice.between(1, 4)):
            twins.post_recv(qp, drawer.receive(qp, twins.new_wr_id(RECEIVE_SIDE)))

    @precondition(lambda self: self.twins.of(Queue))
    @rule(dice=DICE, count=st.sampled_from([1, 2, 1000]))
    def poll(self, dice: Dice, count: int) -> None:
        self.work(dice)
        self.twins.poll(dice.pick(self.twins.of(Queue)), count)

    @precondition(lambda self: self.twins.memories)
    @rule(dice=DICE, fill=st.binary(min_size=1, max_size=16))
    def write_from_here(self, dice: Dice, fill: bytes) -> None:
        """The user changes memory, too."""
        self.work(dice)
        self.twins.settle()
        buffer, memory = dice.pick(self.twins.memories)
        for content in (buffer.content, memory):
            content[:] = (fill * len(content))[: len(content)]

    # ---- events

    @precondition(lambda self: any(queue.channel for queue in self.twins.of(Queue)))
    @rule(dice=DICE, solicited_only=st.booleans())
    def request_notify(self, dice: Dice, solicited_only: bool) -> None:
        self.work(dice)
        queue = dice.pick([queue for queue in self.twins.of(Queue) if queue.channel])
        self.twins.request_notify(queue, solicited_only)

    @precondition(lambda self: self.twins.of(Channel))
    @rule(dice=DICE)
    def take_event(self, dice: Dice) -> None:
        self.work(dice)
        self.twins.take_event(dice.pick(self.twins.of(Channel)))

    @precondition(lambda self: any(queue.taken for queue in self.twins.of(Queue)))
    @rule(dice=DICE)
    def acknowledge(self, dice: Dice) -> None:
        self.work(dice)
        queue = dice.pick([queue for queue in self.twins.of(Queue) if queue.taken])
        count = dice.between(1, queue.taken)
        self.twins.cq(queue).ack_events(count)
        queue.taken -= count

    # ---- going

    @precondition(lambda self: self.twins.open)
    @rule(dice=DICE)
    def destroy(self, dice: Dice) -> None:
        """Whatever it is: it goes, or refuses."""
        self.work(dice)
        self.twins.destroy(dice.pick(self.twins.open))

    @precondition(lambda self: any(not node.busy for node in self.twins.open))
    @rule(dice=DICE)
    def destroy_a_leaf(self, dice: Dice) -> None:
        self.work(dice)
        leaves = [node for node in self.twins.open if not node.busy]
        assert self.twins.destroy(dice.pick(leaves))

    @precondition(lambda self: self.twins.closed)
    @rule(dice=DICE)
    def use_what_is_closed(self, dice: Dice) -> None:
        self.work(dice)
        self.twins.use_closed(dice.pick(self.twins.closed))

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


@pytest.mark.timeout(280)  # a failure is shrunk for some minutes
def test_device() -> None:
    statuses.clear()
    profile = settings.default
    assert profile is not None
    run_state_machine_as_test(
        Device,
        settings=settings(
            max_examples=profile.max_examples,
            stateful_step_count=50,
            phases=[phase for phase in Phase if phase is not Phase.explain],
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )
    # It went to all of these, more often to the first.
    assert set(statuses) >= {
        WcStatus.SUCCESS,
        WcStatus.LOC_LEN_ERR,
        WcStatus.LOC_PROT_ERR,
        WcStatus.REM_ACCESS_ERR,
        WcStatus.REM_INV_REQ_ERR,
        WcStatus.RNR_RETRY_EXC_ERR,
        WcStatus.WR_FLUSH_ERR,
    }
