"""Cut the power at each step of changes of volumes, and at each step of the recovery after that."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from storage_server.catalog import VolumeRow
from storage_server.errors import InvalidError
from storage_server.files import Disk, File
from storage_server.volume_store import VolumeStore

from tests.storage.parts import BLOCK
from tests.storage.power import Power, PowerCutError, SteppedCatalog

pytestmark = pytest.mark.timeout(120)

SIZE = 4 * BLOCK
OLD = b"old." * (SIZE // 4)
SEEDS = range(3)
MAX_STEPS = 100

ResourceState = dict[str, tuple[bytes, bool]]
"""Volumes by name: contents, and whether they are read only."""


class Work(NamedTuple):
    """A change of a folder with the volume "disk", and the volumes after it."""

    do: Callable[[VolumeStore, VolumeRow], object]
    after: ResourceState


BEFORE: ResourceState = {"disk": (OLD, False)}
WORK = {
    "create": Work(
        lambda store, _: store.make("new", BLOCK, lambda file: file.resize(BLOCK)),
        {**BEFORE, "new": (bytes(BLOCK), False)},
    ),
    "delete": Work(lambda store, row: store.remove(row), {}),
    "grow": Work(lambda store, row: store.resize(row, 2 * SIZE), {"disk": (OLD + bytes(SIZE), False)}),
    "shrink": Work(lambda store, row: store.resize(row, BLOCK), {"disk": (OLD[:BLOCK], False)}),
    "snapshot": Work(lambda store, row: store.copy(row, "then", read_only=True), {**BEFORE, "then": (OLD, True)}),
    "clone": Work(lambda store, row: store.copy(row, "again", read_only=False), {**BEFORE, "again": (OLD, False)}),
}


@contextlib.contextmanager
def powered(root: Path, cut_at: int, seed: int) -> Iterator[tuple[Power, VolumeStore]]:
    """Open a folder on a simulated disk. At the end of the block the power is cut."""
    power = Power(root, cut_at, seed)
    with contextlib.closing(SteppedCatalog(root / "catalog.sqlite")) as catalog:
        catalog.power = power
        yield power, VolumeStore(root, power, catalog)
        power.cut()


def fill(file: File) -> None:
    file.resize(SIZE)
    file.write(OLD, 0)


def prepared(root: Path) -> VolumeRow:
    """Create a folder with one volume."""
    (root / "volumes").mkdir(parents=True)
    with contextlib.closing(SteppedCatalog(root / "catalog.sqlite")) as catalog:
        store = VolumeStore(root, Disk(), catalog)
        store.start()
        return store.make("disk", SIZE, fill)


def state(store: VolumeStore) -> ResourceState:
    """Return all volumes. Check that files and catalog match."""
    found: ResourceState = {}
    for row in store.catalog.volumes():
        with contextlib.closing(store.open(row)) as file:
            content = bytearray(row.size)
            file.read_into(memoryview(content), 0)
            assert file.size() == row.size
        found[row.name] = (bytes(content), row.read_only)
    return found


def recovered(root: Path) -> ResourceState:
    with contextlib.closing(SteppedCatalog(root / "catalog.sqlite")) as catalog:
        assert catalog._query("PRAGMA integrity_check") == [("ok",)]
        store = VolumeStore(root, Disk(), catalog)
        rows = store.start()
        assert catalog.unfinished() == []
        assert {path.name for path in (root / "volumes").iterdir()} == {f"{row.id}.volume" for row in rows}
        return state(store)


def cut_at(step: int, root: Path, seed: int, work: Work) -> tuple[Power, bool]:
    """Do some work; return the disk, and whether the work was acknowledged.

    If it has fewer steps, cut the power after it.
    """
    row, done = prepared(root), False
    with powered(root, step, seed) as (power, store):
        with contextlib.suppress(PowerCutError):
            work.do(store, row)
            done = True
        return power, done


@pytest.mark.parametrize("name", WORK)
def test_an_interrupted_change_is_done_completely_or_not_at_all(name: str, tmp_path: Path) -> None:
    work, seen, steps = WORK[name], [], 0
    for step, seed in itertools.product(range(1, MAX_STEPS), SEEDS):
        power, done = cut_at(step, tmp_path / f"{step}-{seed}", seed, work)
        power.restore(tmp_path / f"{step}-{seed}-after")
        found = recovered(tmp_path / f"{step}-{seed}-after")
        assert found == work.after if done else found in (BEFORE, work.after)
        seen.append(found)
        steps = len(power.done)
        if steps < step:
            break
    assert 3 <= steps < MAX_STEPS - 1
    assert work.after in seen
    assert BEFORE in seen


def started(root: Path, step: int) -> Power:
    """Start a server on a folder, and cut the power at a step of the start."""
    with powered(root, step, step) as (power, store):
        with contextlib.suppress(PowerCutError):
            store.start()
        return power


@pytest.mark.parametrize("name", WORK)
def test_an_interrupted_recovery_is_repeated(name: str, tmp_path: Path) -> None:
    """Cut the power at each step of the recovery, for each step at which the work was interrupted."""
    work, cuts, steps = WORK[name], 0, 0
    for step in range(1, MAX_STEPS):
        power, done = cut_at(step, tmp_path / f"{step}", step, work)
        for recovery_step in range(1, MAX_STEPS):
            first, second = tmp_path / f"{step}-{recovery_step}-1", tmp_path / f"{step}-{recovery_step}-2"
            power.restore(first)
            later = started(first, recovery_step)
            later.restore(second)
            found = recovered(second)
            assert found == work.after if done else found in (BEFORE, work.after)
            if len(later.done) < recovery_step:
                break
            cuts += 1
        steps = len(power.done)
        if steps < step:
            break
    assert cuts > steps


@pytest.mark.parametrize("name", WORK)
def test_a_failing_step_leaves_volumes_consistent(name: str, tmp_path: Path) -> None:
    """The failure is reported. The volumes are unchanged or completely changed, before and after the next start."""
    work = WORK[name]
    for step in range(1, MAX_STEPS):
        root = tmp_path / f"{step}"
        row, done = prepared(root), False
        power = FailsOnce(root, step)
        with contextlib.closing(SteppedCatalog(root / "catalog.sqlite")) as catalog, contextlib.suppress(OSError):
            work.do(VolumeStore(root, power, catalog), row)
            done = True
        found = recovered(root)
        assert found == work.after if done else found in (BEFORE, work.after)
        if len(power.done) < step:
            assert done
            return
    raise AssertionError("the work has more than MAX_STEPS steps")


class FailsOnce(Power):
    """A disk that fails at one step only."""

    def step(self, what: str) -> None:
        self.done.append(what)
        if len(self.done) == self._cut_at:
            raise OSError(5, "the disk failed once")


def test_missing_or_short_files_are_reported(tmp_path: Path) -> None:
    row = prepared(tmp_path)
    path = tmp_path / "volumes" / f"{row.id}.volume"
    with path.open("r+b") as file:
        file.truncate(BLOCK)
    with pytest.raises(InvalidError, match=r"has 4,096 of 16,384 bytes"):
        recovered(tmp_path)
    path.unlink()
    with pytest.raises(InvalidError, match="is missing"):
        recovered(tmp_path)


def test_catalogs_of_another_version_are_rejected(tmp_path: Path) -> None:
    prepared(tmp_path)
    with contextlib.closing(SteppedCatalog(tmp_path / "catalog.sqlite")) as catalog:
        catalog._query("PRAGMA user_version = 7")
    with pytest.raises(InvalidError, match="has version 7"):
        SteppedCatalog(tmp_path / "catalog.sqlite")


def test_commits_are_durable_when_they_return(tmp_path: Path) -> None:
    with contextlib.closing(SteppedCatalog(tmp_path / "catalog.sqlite")) as catalog:
        assert catalog._query("PRAGMA journal_mode") == [("wal",)]
        assert catalog._query("PRAGMA synchronous") == [(2,)]
        assert catalog._query("PRAGMA foreign_keys") == [(1,)]
