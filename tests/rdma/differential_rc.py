"""Random sequences of RC work: drawn once, then executed by the same code on any device, and their results.

A sequence is a list of bursts. In a burst one end posts receives, then the other end posts requests, the last of them
signalled; then all results are awaited. Only behaviour that the order of requests determines is drawn, so a correct
device has exactly one result:

- Requests read from a part of the memory that they do not change; receives and responses have slots of their own.
- Behaviour in which devices may differ is left out: receives posted while a sender waits, both ends posting at once.
- A request with a local fault is the first of its burst; before it, requests might still be in flight. Reads and
  atomics have no local faults: it is unspecified whether the peer executes one whose response cannot be stored.
- If requests are going to be retried (the peer is broken or has too few receives), none has a fence: on soft-RoCE, a
  fenced request followed by an atomic is then retried for ever.
"""

import random
import time
from dataclasses import dataclass, field

from aioverbs import AccessFlags, Mtu, QpState, SendFlags, SendOpcode, VerbsError, WcFlags, WcStatus
from aioverbs._core.handles import handles
from aioverbs.attributes import AddressVector, QpCapabilities
from tests.raw_verbs import poll, post_recv, post_send

GID_INDEX = 1
PATIENCE_S = 3.0
MTU = 1024

# Memory of an end: the source of requests and target of peers' writes, slots of responses, slots of receives.
SOURCE, SLOT, ANSWERS, RECEIVES = 16384, 6144, 8, 8
ANSWERS_AT = SOURCE
RECEIVES_AT = ANSWERS_AT + SLOT * ANSWERS
SIZE = RECEIVES_AT + SLOT * RECEIVES

# Regions of the same memory by name; peers access any of them.
LOCAL = AccessFlags.LOCAL_WRITE
REGIONS = {
    "all": LOCAL | AccessFlags.REMOTE_WRITE | AccessFlags.REMOTE_READ | AccessFlags.REMOTE_ATOMIC,
    "local": LOCAL,
    "readable": LOCAL | AccessFlags.REMOTE_READ,
    "writable": LOCAL | AccessFlags.REMOTE_WRITE,
}
ATOMICS = (SendOpcode.ATOMIC_CMP_AND_SWP, SendOpcode.ATOMIC_FETCH_AND_ADD)
ANSWERED = (SendOpcode.RDMA_READ, *ATOMICS)
RECEIVED = (SendOpcode.SEND, SendOpcode.SEND_WITH_IMM, SendOpcode.RDMA_WRITE_WITH_IMM)
OPCODES = (SendOpcode.RDMA_WRITE, *RECEIVED, *ANSWERED)
BAD_KEY = 0x500000  # added to a key


@dataclass
class Request:
    """A send request; offsets are into the memories of the ends."""

    opcode: SendOpcode
    flags: SendFlags
    pieces: list[tuple[int, int]]  # parts of local memory: offset, length
    remote: int = 0
    region: str = "all"  # region of the peer
    bad_lkey: bool = False
    bad_rkey: bool = False
    slot: int | None = None  # slot for the response
    operands: tuple[int, int] = (0, 0)


@dataclass
class Receive:
    """A receive into a slot."""

    slot: int
    length: int
    bad_key: bool = False


@dataclass
class Burst:
    """Requests of one end, after its peer has posted receives; and an optional change of state before."""

    side: int
    receives: list[Receive]
    requests: list[Request]
    before: str = ""  # "", "error" (of that end) or "again" (both ends are reset and reconnected)


@dataclass
class Sequence:
    """A sequence drawn from a seed."""

    seed: int
    qp_access: tuple[AccessFlags, AccessFlags]
    bursts: list[Burst]


def _length(rng: random.Random) -> int:
    return rng.choice((0, 1, rng.randrange(1, 64), rng.randrange(64, 1024), 1024, 1025, rng.randrange(1, 5000)))


def _pieces(rng: random.Random, length: int, start: int) -> list[tuple[int, int]]:
    """Return up to three pieces of total `length`, contiguous or, within the source, anywhere."""
    cuts = sorted(rng.sample(range(1, length), min(rng.randrange(3), length - 1))) if length > 1 else []
    parts = [(begin, end) for begin, end in zip([0, *cuts], [*cuts, length], strict=True) if end > begin]
    if start:
        return [(start + begin, end - begin) for begin, end in parts]
    return [(rng.randrange(SOURCE - (end - begin)), end - begin) for begin, end in parts]


def _request(rng: random.Random, position: int) -> Request:
    opcode = rng.choice(OPCODES)
    flags = SendFlags(0)
    for flag, chance in ((SendFlags.SIGNALED, 0.5), (SendFlags.FENCE, 0.2), (SendFlags.SOLICITED, 0.2)):
        flags |= flag if rng.random() < chance else SendFlags(0)
    length = 8 if opcode in ATOMICS else _length(rng)
    slot = position if opcode in ANSWERED else None
    start = ANSWERS_AT + SLOT * slot if slot is not None else 0
    request = Request(opcode, flags, _pieces(rng, length, start) if opcode not in ATOMICS else [(start, 8)], slot=slot)
    request.remote = rng.randrange(SOURCE - 5000) & (~7 if opcode in ATOMICS else ~0)
    request.operands = rng.choice(((0, 1), (1, 0), (rng.getrandbits(64), rng.getrandbits(64))))
    if opcode not in ANSWERED and 0 < length <= 64 and rng.random() < 0.5:
        request.flags |= SendFlags.INLINE
    fault = rng.random()
    if fault < 0.03:
        request.bad_rkey = True
    elif fault < 0.06:
        request.remote = SIZE - (0 if opcode in ATOMICS else length // 2)
    elif fault < 0.12:
        request.region = rng.choice(("local", "readable", "writable"))
    elif fault < 0.15 and position == 0 and opcode not in ANSWERED and not request.flags & SendFlags.INLINE:
        request.bad_lkey = True
    return request


def _burst(rng: random.Random, before: str) -> Burst:
    requests = [_request(rng, position) for position in range(rng.randrange(1, ANSWERS))]
    requests[-1].flags |= SendFlags.SIGNALED
    wanted = sum(request.opcode in RECEIVED for request in requests)
    count = min(RECEIVES, wanted if rng.random() < 0.85 else rng.randrange(RECEIVES))
    if count < wanted:
        # soft-RoCE retries these for ever: packets before the last one, which alone needs a receive, count as progress.
        for request in requests:
            if request.opcode is SendOpcode.RDMA_WRITE_WITH_IMM:
                request.pieces = [(offset, min(length, MTU // 3)) for offset, length in request.pieces]
    receives = [Receive(slot, SLOT) for slot in range(count)]
    for receive in receives:
        if rng.random() < 0.05:
            receive.length = rng.randrange(1, 200)
        elif rng.random() < 0.02:
            receive.bad_key = True
    return Burst(rng.randrange(2), receives, requests, before)


def draw(seed: int) -> Sequence:
    """Return the sequence for a seed."""
    rng = random.Random(seed)
    remote = REGIONS["all"] & ~LOCAL
    accesses = (remote, remote, remote, AccessFlags.REMOTE_READ, AccessFlags.REMOTE_WRITE)
    before = [*[""] * 5, "error", *["again"] * 6]
    bursts = [_burst(rng, rng.choice(before)) for _ in range(rng.randrange(1, 8))]
    return Sequence(seed, (rng.choice(accesses), rng.choice(accesses)), bursts)


# ---- Execution -----------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Results of a burst: completions by queue, states, and the memory of both ends except undefined parts."""

    sends: list[tuple[object, ...]] = field(default_factory=list)
    receives: list[tuple[object, ...]] = field(default_factory=list)
    others: list[tuple[object, ...]] = field(default_factory=list)  # on the two queues that the burst does not use
    states: list[str] = field(default_factory=list)
    memory: list[bytes] = field(default_factory=list)
    bad_keys: set[int] = field(default_factory=set)  # receives posted with a bad key


class End:
    """A queue pair with queues, memory and regions."""

    def __init__(self, pd: handles.ProtectionDomain) -> None:
        self.memory = bytearray(SIZE)
        self.regions = {name: handles.MemoryRegion(pd, self.memory, access) for name, access in REGIONS.items()}
        self.send_cq = handles.CompletionQueue(pd.context, 128)
        self.recv_cq = handles.CompletionQueue(pd.context, 128)
        capabilities = QpCapabilities(
            max_send_wr=32, max_recv_wr=64, max_send_sge=4, max_recv_sge=4, max_inline_data=64
        )
        self.qp = handles.QueuePair(pd, self.send_cq, self.recv_cq, capabilities)
        self.posted: dict[int, Receive] = {}  # by wr_id; if the queue pair enters ERR, all of them complete

    def address(self, offset: int) -> int:
        return self.regions["all"].address + offset

    def destroy(self) -> None:
        for handle in (self.qp, self.send_cq, self.recv_cq, *self.regions.values()):
            handle.destroy()


def _connect(qp: handles.QueuePair, peer: handles.QueuePair, access: AccessFlags) -> None:
    qp.modify(QpState.INIT, pkey_index=0, port_num=1, qp_access_flags=access)
    qp.modify(
        QpState.RTR,
        path_mtu=Mtu.MTU_1024,
        dest_qp_num=peer.qp_num,
        rq_psn=7,
        max_dest_rd_atomic=4,
        min_rnr_timer=1,
        av=AddressVector(dgid=qp.context.query_gid(1, GID_INDEX), sgid_index=GID_INDEX),
    )
    # A virtual machine may stall for 50 ms: the retry timeout is at least 134 ms.
    qp.modify(QpState.RTS, timeout=14, retry_cnt=1, rnr_retry=1, sq_psn=7, max_rd_atomic=4)


class World:
    """Two connected ends on one device, in which a sequence is executed."""

    def __init__(self, pd: handles.ProtectionDomain, sequence: Sequence) -> None:
        self.sequence = sequence
        self.ends = [End(pd), End(pd)]
        rng = random.Random(sequence.seed)
        for end in self.ends:
            end.memory[:] = rng.randbytes(SIZE)
        self.connect()
        self.wr_id = 0

    def connect(self) -> None:
        for side, end in enumerate(self.ends):
            _connect(end.qp, self.ends[1 - side].qp, self.sequence.qp_access[side])

    def destroy(self) -> None:
        for end in self.ends:
            end.destroy()

    def execute(self, burst: Burst) -> Result:
        sender, receiver = self.ends[burst.side], self.ends[1 - burst.side]
        result = Result()
        self._change_states(burst.before, sender, result)
        for receive in burst.receives:
            self._post_receive(receiver, receive)
        waiting = dict(receiver.posted)
        posted: dict[int, Request] = {}
        wanted = sum(request.opcode in RECEIVED for request in burst.requests)
        tried_again = len(burst.receives) < wanted or receiver.qp.query().qp_state is QpState.ERR
        for request in burst.requests:
            self.wr_id += 1
            posted[self.wr_id] = request
            flags = request.flags & ~SendFlags.FENCE if tried_again else request.flags
            result.sends.extend(self._post(sender, receiver, request, flags))
        failed = self._collect_sends(sender, result)
        if failed in (WcStatus.REM_ACCESS_ERR, WcStatus.REM_INV_REQ_ERR, WcStatus.REM_OP_ERR):
            _wait_for_error(receiver.qp)
        for end, found in ((receiver, result.receives), (sender, result.others)):
            self._collect_receives(end, found)
        result.bad_keys = {wr_id for wr_id, receive in waiting.items() if receive.bad_key}
        self._finish(result, sender, receiver, posted, waiting)
        return result

    def _change_states(self, before: str, sender: End, result: Result) -> None:
        if before == "error":
            sender.qp.modify(QpState.ERR)
            self._collect_receives(sender, result.others)
        elif before == "again":
            for end in self.ends:
                end.qp.modify(QpState.RESET)
                end.posted.clear()
            self.connect()

    def _post_receive(self, end: End, receive: Receive) -> None:
        if end.qp.query().qp_state is QpState.ERR:
            return  # soft-RoCE never flushes requests posted in ERR
        self.wr_id += 1
        end.posted[self.wr_id] = receive
        key = end.regions["all"].lkey + (BAD_KEY if receive.bad_key else 0)
        post_recv(end.qp, [(end.address(RECEIVES_AT + SLOT * receive.slot), receive.length, key)], wr_id=self.wr_id)

    def _post(self, sender: End, receiver: End, request: Request, flags: SendFlags) -> list[tuple[object, ...]]:
        """Post a request; return the results if posting fails."""
        lkey = sender.regions["all"].lkey + (BAD_KEY if request.bad_lkey else 0)
        region = receiver.regions[request.region]
        try:
            post_send(
                sender.qp,
                request.opcode,
                [(sender.address(offset), length, lkey) for offset, length in request.pieces],
                wr_id=self.wr_id,
                flags=flags,
                remote_addr=region.address + request.remote,
                rkey=region.rkey + (BAD_KEY if request.bad_rkey else 0),
                imm_data=self.wr_id,
                compare_add=request.operands[0],
                swap=request.operands[1],
            )
        except VerbsError as error:
            return [("refused", self.wr_id, error.errno)]
        return []

    def _collect_sends(self, end: End, result: Result) -> WcStatus:
        """Collect all send completions up to the burst's last request; return the status of the first failure."""
        failed = WcStatus.SUCCESS
        deadline = time.monotonic() + PATIENCE_S
        while ("refused", self.wr_id) not in [entry[:2] for entry in result.sends]:
            for completion in poll(end.send_cq, 16):
                good = completion.status is WcStatus.SUCCESS
                failed = failed or completion.status
                # For failed requests, only these fields are valid.
                result.sends.append((completion.wr_id, completion.status, completion.opcode if good else None))
                if completion.wr_id == self.wr_id:
                    return failed
            if time.monotonic() > deadline:
                result.sends.append(("nothing", self.wr_id))
                return failed
        return failed

    def _collect_receives(self, end: End, found: list[tuple[object, ...]]) -> None:
        """Collect completed receives; all posted ones if the queue pair is in ERR."""
        all_of_it = end.qp.query().qp_state is QpState.ERR
        deadline = time.monotonic() + PATIENCE_S
        while True:
            completions = poll(end.recv_cq, 16)
            for completion in completions:
                end.posted.pop(completion.wr_id, None)
                good = completion.status is WcStatus.SUCCESS
                flags = completion.wc_flags & WcFlags.WITH_IMM  # soft-RoCE sets GRH on connected queue pairs, too
                valid = (completion.opcode, completion.byte_len, flags, completion.imm_data if flags else 0)
                found.append((completion.wr_id, completion.status, valid if good else None))
            if not completions and not (all_of_it and end.posted):
                return
            if time.monotonic() > deadline:
                found.append(("nothing", tuple(end.posted)))
                return

    def _finish(
        self,
        result: Result,
        sender: End,
        receiver: End,
        posted: dict[int, Request],
        waiting: dict[int, Receive],
    ) -> None:
        """Record states and memory. Clear what failed receives and responses left, which is undefined."""
        good = {entry[0] for entry in (*result.sends, *result.receives) if entry[1] is WcStatus.SUCCESS}
        broken = sender.qp.query().qp_state is QpState.ERR
        for wr_id, request in posted.items():
            if broken and wr_id not in good and request.slot is not None:
                _wipe(sender, ANSWERS_AT + SLOT * request.slot, SLOT)
            if broken and wr_id not in good and request.opcode is SendOpcode.RDMA_WRITE_WITH_IMM:
                # The responder may detect the lack of a receive only at the last packet.
                _wipe(receiver, request.remote, sum(length for _, length in request.pieces))
        for wr_id, receive in waiting.items():
            if wr_id not in good:
                _wipe(receiver, RECEIVES_AT + SLOT * receive.slot, SLOT)
        result.states = [end.qp.query().qp_state.name for end in self.ends]
        result.memory = [bytes(end.memory) for end in self.ends]


def _wipe(end: End, offset: int, length: int) -> None:
    until = min(SIZE, offset + length)
    end.memory[offset:until] = bytes(until - offset)


def _wait_for_error(qp: handles.QueuePair) -> None:
    """Wait for the ERR state: the sender may learn of the rejected request slightly before the responder enters it."""
    deadline = time.monotonic() + PATIENCE_S
    while qp.query().qp_state is not QpState.ERR and time.monotonic() < deadline:
        time.sleep(1e-4)


def execute(pd: handles.ProtectionDomain, sequence: Sequence) -> list[Result]:
    """Return the results of each burst of a sequence, executed on the device of a protection domain."""
    world = World(pd, sequence)
    try:
        return [world.execute(burst) for burst in sequence.bursts]
    finally:
        world.destroy()


# ---- Known differences
# -------------------------------------------------------------------------------------------------


def normalize(results: list[Result]) -> list[Result]:
    """Replace soft-RoCE's known deviations by the results that the specification requires.

    - For a bad local key, soft-RoCE reports LOC_QP_OP_ERR instead of LOC_PROT_ERR: at the sender, and at the receiver,
      whose sender gets REM_OP_ERR in either case.
    - It reports the same for a message longer than its receive, instead of LOC_LEN_ERR at the receiver and
      REM_INV_REQ_ERR at the sender.
    - A write with immediate data consumes its receive before its key is checked: if the write is rejected, the receive
      fails with the sender's status. By the specification the receive is not consumed, and is flushed.
    """
    for result in results:
        at_receiver = {entry[0]: _at_receiver(result, entry) for entry in result.receives}
        sends = {WcStatus.LOC_QP_OP_ERR: WcStatus.LOC_PROT_ERR}
        if WcStatus.LOC_LEN_ERR in at_receiver.values():
            sends[WcStatus.REM_OP_ERR] = WcStatus.REM_INV_REQ_ERR
        result.sends = [_translated(entry, sends) for entry in result.sends]
        result.receives = [
            _translated(
                entry,
                {WcStatus.LOC_QP_OP_ERR: at_receiver[entry[0]], WcStatus.REM_ACCESS_ERR: WcStatus.WR_FLUSH_ERR},
            )
            for entry in result.receives
        ]
    return results


def _at_receiver(result: Result, entry: tuple[object, ...]) -> WcStatus:
    """Return the specified status of a receive that failed with LOC_QP_OP_ERR; else SUCCESS."""
    if entry[1] is not WcStatus.LOC_QP_OP_ERR:
        return WcStatus.SUCCESS
    return WcStatus.LOC_PROT_ERR if entry[0] in result.bad_keys else WcStatus.LOC_LEN_ERR


def _translated(entry: tuple[object, ...], names: dict[WcStatus, WcStatus]) -> tuple[object, ...]:
    return tuple(names.get(part, part) if isinstance(part, WcStatus) else part for part in entry)
