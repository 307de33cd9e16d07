"""Random datagrams: drawn once, then executed by the same code on any device, and their results.

Three queue pairs send to each other, one datagram after the other. Whether a datagram must arrive is drawn with it; one
that must is awaited. The result is what arrives: at the end of a sequence there is time for datagrams that should not
arrive.
"""

import random
import time
from dataclasses import dataclass, field

from aioverbs import AccessFlags, QpState, SendFlags, SendOpcode, WcFlags, WcStatus
from aioverbs._core.handles import handles
from aioverbs.attributes import AddressVector, QpCapabilities
from tests.raw_verbs import poll, post_recv, post_send

GID_INDEX = 1
PATIENCE_S = 5.0
QUIET_S = 0.03
GRH = 40
MTU = 4096  # maximum
SLOT, SLOTS = MTU + GRH + 24, 8
QKEYS = (0x11, 0x22, 0x33)  # of the queue pairs


@dataclass
class Datagram:
    """A datagram, and the number of receives that its target posts before."""

    source: int
    target: int
    length: int
    with_imm: bool
    inline: bool
    qkey: int
    to_nobody: bool  # sent to a number that no queue pair has
    receives: int

    @property
    def welcome(self) -> bool:
        """Whether the datagram arrives if a receive is posted."""
        return self.qkey == QKEYS[self.target] and not self.to_nobody


def draw(seed: int, mtu: int = MTU) -> list[Datagram]:
    """Return the sequence for a seed, for a port with an MTU."""
    rng = random.Random(seed)
    sequence = []
    for _ in range(rng.randrange(4, 25)):
        target = rng.randrange(len(QKEYS))
        length = rng.choice((0, 1, rng.randrange(1, 256), rng.randrange(mtu), mtu - 1, mtu))
        sequence.append(
            Datagram(
                source=rng.randrange(len(QKEYS)),
                target=target,
                length=length,
                with_imm=rng.random() < 0.4,
                inline=length <= 64 and rng.random() < 0.5,
                qkey=QKEYS[target] if rng.random() < 0.8 else rng.choice((0, *QKEYS)),
                to_nobody=rng.random() < 0.05,
                receives=rng.choice((0, 0, 1, 1, 2)),
            )
        )
    return sequence


@dataclass
class Result:
    """Results of a sequence, by queue pair."""

    sends: list[list[tuple[object, ...]]] = field(default_factory=lambda: [[] for _ in QKEYS])
    receives: list[list[tuple[object, ...]]] = field(default_factory=lambda: [[] for _ in QKEYS])
    states: list[str] = field(default_factory=list)


class Member:
    """A queue pair with queues and memory."""

    def __init__(self, pd: handles.ProtectionDomain, qkey: int) -> None:
        self.memory = bytearray(MTU + SLOT * SLOTS)  # source, then slots of receives
        self.region = handles.MemoryRegion(pd, self.memory, AccessFlags.LOCAL_WRITE)
        self.send_cq = handles.CompletionQueue(pd.context, 64)
        self.recv_cq = handles.CompletionQueue(pd.context, 64)
        capabilities = QpCapabilities(
            max_send_wr=16, max_recv_wr=16, max_send_sge=2, max_recv_sge=2, max_inline_data=64
        )
        self.qp = handles.QueuePair(pd, self.send_cq, self.recv_cq, capabilities, qp_type=4)
        self.qp.modify(QpState.INIT, pkey_index=0, port_num=1, qkey=qkey)
        self.qp.modify(QpState.RTR)
        self.qp.modify(QpState.RTS, sq_psn=0)
        self.free = list(range(SLOTS))

    def destroy(self) -> None:
        for handle in (self.qp, self.send_cq, self.recv_cq, self.region):
            handle.destroy()


class World:
    """The queue pairs of a sequence on one device."""

    def __init__(self, pd: handles.ProtectionDomain, seed: int) -> None:
        rng = random.Random(seed)
        self.ah = handles.AddressHandle(
            pd, AddressVector(dgid=pd.context.query_gid(1, GID_INDEX), sgid_index=GID_INDEX, hop_limit=1)
        )
        self.members = [Member(pd, qkey) for qkey in QKEYS]
        self.numbers = {member.qp.qp_num: index for index, member in enumerate(self.members)}
        for member in self.members:
            member.memory[:MTU] = rng.randbytes(MTU)
        self.result = Result()

    def destroy(self) -> None:
        for member in self.members:
            member.destroy()
        self.ah.destroy()

    def send(self, position: int, datagram: Datagram) -> None:
        source, target = self.members[datagram.source], self.members[datagram.target]
        for _ in range(min(datagram.receives, len(target.free))):
            slot = target.free.pop(0)
            post_recv(target.qp, [(target.region.address + MTU + SLOT * slot, SLOT, target.region.lkey)], wr_id=slot)
        expected = datagram.welcome and len(target.free) < SLOTS
        post_send(
            source.qp,
            SendOpcode.SEND_WITH_IMM if datagram.with_imm else SendOpcode.SEND,
            [(source.region.address, datagram.length, source.region.lkey)] if datagram.length else [],
            wr_id=position,
            flags=SendFlags.SIGNALED | (SendFlags.INLINE if datagram.inline else 0),
            imm_data=position,
            ah=self.ah,
            remote_qpn=0xFFFFF0 if datagram.to_nobody else target.qp.qp_num,
            remote_qkey=datagram.qkey,
        )
        deadline = time.monotonic() + PATIENCE_S
        while not (found := poll(source.send_cq, 4)):
            assert time.monotonic() < deadline, f"datagram {position} was never sent"
        self.result.sends[datagram.source] += [(each.wr_id, each.status, each.opcode) for each in found]
        while expected and not self.receive(datagram.target):
            if time.monotonic() > deadline:
                self.result.receives[datagram.target].append(("nothing", position))
                return

    def receive(self, index: int) -> int:
        """Collect the datagrams that arrived at a queue pair; return their number."""
        member = self.members[index]
        found = poll(member.recv_cq, 8)
        for each in found:
            member.free.append(each.wr_id)
            if each.status is not WcStatus.SUCCESS:
                self.result.receives[index].append((each.wr_id, each.status))
                continue
            begin = MTU + SLOT * each.wr_id
            flags = each.wc_flags & (WcFlags.GRH | WcFlags.WITH_IMM)
            imm = each.imm_data if flags & WcFlags.WITH_IMM else 0
            # Only the length of the GRH counts: its addresses are those of the device.
            content = bytes(member.memory[begin + GRH : begin + each.byte_len])
            source = self.numbers.get(each.src_qp)
            entry = (each.wr_id, each.status, each.opcode, each.byte_len, flags, imm, source, content)
            self.result.receives[index].append(entry)
        return len(found)

    def finish(self) -> Result:
        time.sleep(QUIET_S)
        for index, member in enumerate(self.members):
            self.receive(index)
            self.result.states.append(member.qp.query().qp_state.name)
        return self.result


def execute(pd: handles.ProtectionDomain, seed: int, sequence: list[Datagram]) -> Result:
    """Return the results of a sequence, executed on the device of a protection domain."""
    world = World(pd, seed)
    try:
        for position, datagram in enumerate(sequence):
            world.send(position, datagram)
        return world.finish()
    finally:
        world.destroy()
