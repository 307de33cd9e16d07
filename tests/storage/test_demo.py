"""The demonstration: its files, its output, and its reaction to wrong bytes and to processes that die."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from storage_server.catalog import BLOCK
from storage_server.demo import scenario
from storage_server.demo.files import LARGEST, MIN_BYTES, SMALLEST, data_files, end_of
from storage_server.errors import InvalidError

from tests.pace import patience
from tests.running import wait_for_ends
from tests.storage.processes import command, run, run_in_process

SMALL = ("demo", "--size", "2M", "--seconds", "0.2", "--device", "soft0")
KEYS = ["verified", "device", "native", "files", "bytes", "seconds", "wrong", "blocks", "read_us", "flushes", "syncs"]
KEYS += ["message_bytes", "affinity_error", "tree"]

Scenario = Any  # alias for readability: the class is private


# ---- Files

totals = st.integers(MIN_BYTES, 256 << 20)
seeds = st.text(max_size=5)


@given(totals, seeds)
def test_files_have_the_total_size_and_share_no_block(total: int, seed: str) -> None:
    files, end = data_files(total, seed), 0
    assert sum(file.size for file in files) == total
    assert min(file.size for file in files) <= SMALLEST
    assert max(file.size for file in files) <= LARGEST
    assert len({file.name for file in files}) == len(files)
    assert files == data_files(total, seed)
    for file in files:
        assert file.offset == end
        end = -(-(end + file.size) // BLOCK) * BLOCK
    assert end_of(files) == end


def test_sizes_are_mixed() -> None:
    sizes = [file.size for file in data_files(100 << 20, "1")]
    assert max(sizes) == 25 << 20
    for least, most in ((1, 1 << 10), (1 << 10, 1 << 20), (1 << 20, LARGEST)):
        assert sum(least <= size < most for size in sizes) >= 3


def test_too_few_bytes_are_rejected() -> None:
    with pytest.raises(InvalidError, match=r"at least 65,536 bytes together, got 65,535"):
        data_files(MIN_BYTES - 1, "")


def test_contents_are_reproducible_and_differ_between_files() -> None:
    files = data_files(1 << 20, "1")
    contents = [file.contents() for file in files]
    assert [len(each) for each in contents] == [file.size for file in files]
    assert contents == [file.contents() for file in data_files(1 << 20, "1")]
    assert len(set(contents)) == len(files)


# ---- Complete runs


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory for temporary files; check that the demonstration leaves none there."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield path
    assert list(path.iterdir()) == []


def descendants(pid: int) -> list[int]:
    """Return the children of a process, the latest last."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_json_output() -> None:
    done = run(*SMALL, "--clients", "3", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert list(result) == KEYS
    assert (result["verified"], result["wrong"], result["device"], result["native"]) == (True, [], "soft0", True)
    assert result["bytes"] == (2 << 20) // 3 * 3
    assert result["flushes"] == result["files"] > 9
    assert 0 < result["syncs"] <= result["flushes"] + 9, "including syncs of closed volumes"
    assert result["message_bytes"] == 0, "all data moved one-sidedly"
    assert list(result["seconds"]) == ["making files", "writing", "reading and comparing", "reading blocks"]
    assert result["blocks"] > 0
    assert 0 < result["read_us"]["p50"] <= result["read_us"]["p99"] <= result["read_us"]["max"]
    assert "ibv_post_send on <QueuePair" in result["affinity_error"]
    assert len(re.findall("Connection with", result["tree"])) == 3


def test_human_readable_output() -> None:
    done = run_in_process(*SMALL)
    assert (done.status, done.complaints) == (0, "")
    assert all(character.isprintable() or character == "\n" for character in done.output)
    for said in ("reading and comparing: 2.1 MB in ", "WorkerPool", "AffinityError: ibv_post_send", "domains native"):
        assert said in done.output
    last = done.output.splitlines()[-1]
    assert re.fullmatch(r"verified: 2,097,152 bytes in \d+ files, each byte", last)


# ---- Failures


@pytest.fixture
def run_before(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object]], None]:
    """Return a function that registers an action to run before a phase."""

    def register(title: str, do: Callable[[], object]) -> None:
        phase = scenario._Scenario._phase

        async def run_phase(self: Scenario, begun: str, *args: Any) -> list[Any]:
            if begun == title:
                do()
            return await phase(self, begun, *args)

        monkeypatch.setattr(scenario._Scenario, "_phase", run_phase)

    return register


def volumes(temporary: Path) -> list[Path]:
    """Return the files of the server's volumes."""
    (folder,) = temporary.iterdir()
    return sorted((folder / "server" / "volumes").iterdir())


def test_wrong_bytes_are_reported(temporary: Path, run_before: Callable[[str, Callable[[], object]], None]) -> None:
    """Corrupt one byte of a file before the comparison, and all blocks before the reads of blocks."""

    def spoil() -> None:
        with volumes(temporary)[0].open("r+b") as volume:
            byte = volume.read(1)
            volume.seek(0)
            volume.write(bytes([byte[0] ^ 1]))

    def wipe() -> None:
        for path in volumes(temporary):
            path.write_bytes(bytes(path.stat().st_size))

    run_before("reading and comparing", spoil)
    run_before("reading blocks", wipe)
    status, output, _ = run_in_process(*SMALL)
    assert status == 1
    assert len(re.findall(r"wrong: client-[12]/file-0000 *\n", output)) == 1
    assert re.search(r"wrong: [\d,]+ blocks of client-1 *\n", output)
    assert output.endswith("verification failed\n")


def test_a_killed_client_ends_the_demonstration(run_before: Callable[[str, Callable[[], object]], None]) -> None:
    others = descendants(os.getpid())
    run_before("reading and comparing", lambda: os.kill(descendants(os.getpid())[-1], signal.SIGKILL))
    status, _, complaints = run_in_process(*SMALL, "--json")
    assert status == 1
    assert re.fullmatch(r"Error: .*worker \d .*\n", complaints)
    assert descendants(os.getpid()) == others


def test_too_little_disk_space_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=5 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    status, _, output = run_in_process(*SMALL)
    assert status == 1
    assert "5 MiB free, but 70 MiB are needed: set TMPDIR to another folder, or reduce --size" in output


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (("--size", "1K"), "bytes together"),
        (("--device", "mlx5_7"), ""),  # the device does not exist, or the library that lists devices is missing
        (("--size", "much"), "is not a size"),
        (("--clients", "0"), "--clients"),
        (("--seconds", "0"), "--seconds"),
    ],
)
def test_invalid_arguments_are_reported(arguments: tuple[str, ...], output: str) -> None:
    status, _, result = run_in_process(*SMALL, *arguments)
    assert status in (1, 2)
    assert "Error: " in result
    assert output in result


# ---- Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_the_demonstration(number: signal.Signals, temporary: Path) -> None:
    env = {**os.environ, "AIOVERBS_DEVICE": "soft0"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command(*SMALL, "--seconds", "60"), env=env, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("reading and comparing"):
                assert process.poll() is None
            pids = descendants(process.pid)
            assert len(pids) == 2
            process.send_signal(number)
            _, complaints = process.communicate(timeout=patience(20))
        finally:
            process.kill()
    wait_for_ends(pids)
    if number is signal.SIGKILL:
        for left in temporary.iterdir():  # no process was left to delete it
            shutil.rmtree(left)
    else:
        assert (process.returncode, complaints.strip()) == (1, "Aborted!")
