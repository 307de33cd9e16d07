"""The same random work on two devices must have equal results.

Ordinary runs compare both values of `execution` of the software device, and soft-RoCE if there is any.
AIOVERBS_DIFFERENTIAL is the number of sequences of each kind, AIOVERBS_DIFFERENTIAL_SEED the first seed.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from aioverbs import Mtu
from aioverbs._core.handles import handles
from tests.core.contexts import opened as opened_software
from tests.rdma import differential_rc, differential_ud
from tests.rdma.seam import opened, rdma_devices

COUNT = int(os.environ.get("AIOVERBS_DIFFERENTIAL", "60"))
FIRST = int(os.environ.get("AIOVERBS_DIFFERENTIAL_SEED", "1"))
SEEDS = range(FIRST, FIRST + COUNT)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def software() -> Iterator[dict[str, handles.ProtectionDomain]]:
    """Open a protection domain of the software device for each value of `execution`."""
    with ExitStack() as stack:
        contexts = {mode: stack.enter_context(opened_software(mode)) for mode in ("inline", "thread")}
        yield {mode: handles.ProtectionDomain(context) for mode, context in contexts.items()}


@pytest.fixture
def soft_roce() -> Iterator[handles.ProtectionDomain]:
    name = rdma_devices()[0]
    if not name.startswith("rxe"):
        pytest.skip(f"known differences are those of soft-RoCE, not of {name}")
    with opened(name) as context:
        yield handles.ProtectionDomain(context)


def check_rc(
    sequence: differential_rc.Sequence,
    ours: list[differential_rc.Result],
    theirs: list[differential_rc.Result],
    names: tuple[str, str],
) -> None:
    """Compare the results burst by burst; the message of a failure suffices to reproduce it."""
    for burst, one, other in zip(sequence.bursts, ours, theirs, strict=True):
        for part in ("sends", "receives", "others", "states", "memory"):
            found, expected = getattr(one, part), getattr(other, part)
            if found == expected:
                continue
            if part == "memory":
                found, expected = (f"differs at {_differences(one.memory, other.memory)}", "")
            pytest.fail(
                f"seed {sequence.seed}, burst {sequence.bursts.index(burst)}: {part}\n"
                f"{names[0]}: {found}\n{names[1]}: {expected}\n{burst}\nQP access: {sequence.qp_access}\n"
                f"states: {one.states} {other.states}\nsends: {one.sends}\nreceives: {one.receives}",
                pytrace=False,
            )


def _differences(ours: list[bytes], theirs: list[bytes]) -> str:
    """Return the first and the last different byte of each end."""
    found = []
    for side, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        places = [at for at, (left, right) in enumerate(zip(one, other, strict=True)) if left != right]
        found += [f"end {side}: {places[0]} to {places[-1]}"] if places else []
    return "; ".join(found)


def test_rc_with_both_executions(software: dict[str, handles.ProtectionDomain]) -> None:
    for seed in SEEDS:
        sequence = differential_rc.draw(seed)
        inline, threaded = (differential_rc.execute(software[mode], sequence) for mode in ("inline", "thread"))
        check_rc(sequence, inline, threaded, ("inline", "thread"))


@pytest.mark.rdma
def test_rc_on_soft_roce(software: dict[str, handles.ProtectionDomain], soft_roce: handles.ProtectionDomain) -> None:
    for seed in SEEDS:
        sequence = differential_rc.draw(seed)
        ours = differential_rc.execute(software["inline"], sequence)
        theirs = differential_rc.normalize(differential_rc.execute(soft_roce, sequence))
        check_rc(sequence, ours, theirs, ("soft0", "soft-RoCE"))


def test_datagrams_with_both_executions(software: dict[str, handles.ProtectionDomain]) -> None:
    for seed in SEEDS:
        sequence = differential_ud.draw(seed)
        inline, threaded = (differential_ud.execute(software[mode], seed, sequence) for mode in ("inline", "thread"))
        assert inline == threaded, f"seed {seed}"


@pytest.mark.rdma
def test_datagrams_on_soft_roce(
    software: dict[str, handles.ProtectionDomain], soft_roce: handles.ProtectionDomain
) -> None:
    mtu = Mtu(soft_roce.context.query_port(1).active_mtu).size
    for seed in SEEDS:
        sequence = differential_ud.draw(seed, mtu)
        ours = differential_ud.execute(software["inline"], seed, sequence)
        assert ours == differential_ud.execute(soft_roce, seed, sequence), f"seed {seed}"
