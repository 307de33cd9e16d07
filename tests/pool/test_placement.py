"""Policies and keys that choose the worker of a call."""

import asyncio
import collections
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given, strategies as st

from aioverbs import Device, WorkerPool
from aioverbs._pool.placement import Key, LeastLoaded, PlacementPolicy, RoundRobin, rendezvous

workers = st.sets(st.integers(0, 200), min_size=1, max_size=20).map(sorted)
keys = st.one_of(st.text(), st.binary(), st.integers())
KEYS = [f"object-{number}" for number in range(4000)]


@st.composite
def loaded(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    numbers = draw(workers)
    return numbers, draw(st.lists(st.integers(0, 3), min_size=len(numbers), max_size=len(numbers)))


@given(loaded())
def test_policies_choose_existing_workers(case: tuple[list[int], list[int]]) -> None:
    policies: list[PlacementPolicy] = [RoundRobin(), LeastLoaded()]
    for policy in policies:
        assert {policy.choose(*case) for _ in range(5)} <= set(case[0])


@given(workers, st.integers(1, 4))
def test_round_robin_is_even(numbers: list[int], rounds: int) -> None:
    policy = RoundRobin()
    chosen = [policy.choose(numbers, [0] * len(numbers)) for _ in range(len(numbers) * rounds)]
    assert chosen == numbers * rounds


@given(loaded())
def test_least_loaded_chooses_a_worker_with_minimal_load(case: tuple[list[int], list[int]]) -> None:
    numbers, loads = case
    assert loads[numbers.index(LeastLoaded().choose(numbers, loads))] == min(loads)


@given(loaded())
def test_least_loaded_takes_turns_among_equal_loads(case: tuple[list[int], list[int]]) -> None:
    numbers, loads = case
    idle = [worker for worker, load in zip(numbers, loads, strict=True) if load == min(loads)]
    policy = LeastLoaded()
    chosen = [policy.choose(numbers, loads) for _ in range(2 * len(idle))]
    assert collections.Counter(chosen) == dict.fromkeys(idle, 2)


@given(keys, workers, st.data())
def test_removing_a_worker_moves_only_its_own_keys(key: Key, numbers: list[int], data: st.DataObject) -> None:
    home = rendezvous(key, numbers)
    assert home in numbers
    gone = data.draw(st.sampled_from(numbers))
    left = [worker for worker in numbers if worker != gone]
    if gone != home:
        assert rendezvous(key, left) == home
    elif left:
        assert rendezvous(key, left) in left


@given(keys, workers, st.randoms())
def test_rendezvous_ignores_the_order_of_workers(key: Key, numbers: list[int], random: object) -> None:
    assert rendezvous(key, numbers[::-1]) == rendezvous(key, numbers)


@pytest.mark.parametrize("count", [2, 31])
def test_rendezvous_distributes_keys_evenly(count: int) -> None:
    shares = collections.Counter(rendezvous(key, range(count)) for key in KEYS)
    mean = len(KEYS) / count
    assert len(shares) == count
    assert all(abs(share - mean) < 5 * mean**0.5 for share in shares.values()), shares


def test_keys_of_a_removed_worker_are_distributed_evenly() -> None:
    moved = [key for key in KEYS if rendezvous(key, range(8)) == 3]
    shares = collections.Counter(rendezvous(key, [0, 1, 2, 4, 5, 6, 7]) for key in moved)
    mean = len(moved) / 7
    assert all(abs(shares[worker] - mean) < 5 * mean**0.5 for worker in (0, 1, 2, 4, 5, 6, 7)), shares


def test_rendezvous_is_the_same_in_every_process() -> None:
    code = f"from aioverbs._pool.placement import rendezvous\nprint([rendezvous(k, range(16)) for k in {KEYS[:50]}])"
    command = [sys.executable, "-c", code]
    there = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    assert there.stdout.strip() == str([rendezvous(key, range(16)) for key in KEYS[:50]])
    assert [rendezvous(key, range(1000)) for key in ("a", b"a", 1, -1, 2**70, "")] == [0, 0, 217, 943, 654, 224]


def test_a_string_and_its_bytes_are_one_key_and_integers_are_others() -> None:
    assert rendezvous("é", range(1000)) == rendezvous("é".encode(), range(1000))
    assert len({rendezvous(key, range(100_000)) for key in ("1", 1, -1, 2**64 + 1)}) == 4


@pytest.mark.parametrize("key", [None, ("a",)])
def test_keys_of_other_types_are_rejected(key: object) -> None:
    with pytest.raises(TypeError, match="`key` must be a string, bytes or an integer"):
        rendezvous(key, [0])  # type: ignore[arg-type]


async def test_a_policy_that_chooses_a_missing_worker_raises_value_error(device: Device) -> None:
    class Wrong:
        number: Any = 2

        def choose(self, workers: Sequence[int], loads: Sequence[int]) -> int:
            return cast(int, self.number)

    policy = Wrong()
    async with WorkerPool(device, 2, placement=policy) as pool:
        for wrong in (2, -1, None):
            policy.number = wrong
            with pytest.raises(ValueError, match=f"Wrong.* chose worker {wrong}, but .* has the workers 0..1$"):
                await pool.run(asyncio.sleep, 0)
        policy.number = 1
        await pool.run(asyncio.sleep, 0)
