"""`aioverbs doctor`: output, colours and exit status."""

import asyncio
import errno
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from aioverbs import LibraryNotFoundError, VerbsError
from aioverbs._core.handles import handles
from aioverbs._providers import hardware
from aioverbs.cli import doctor, local_peer, machine, main, probe
from aioverbs.cli.machine import Trial, Ways
from tests.cli.processes import COMMAND, environment, run_on_terminal
from tests.cli.trees import Tree

ESCAPE = "\x1b["


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    tree = Tree(tmp_path)
    monkeypatch.setattr(doctor, "inspect_machine", tree.inspect)
    return tree


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main.main, ["doctor", *arguments])


def test_without_devices(tree: Tree) -> None:
    done = invoke()
    assert done.exit_code == 3
    assert "soft0  usable" in done.output
    assert "error: there is no RDMA hardware" in done.output
    assert "\n    sudo modprobe rdma_rxe\n" in done.output


def test_invalid_settings_of_the_software_device(tree: Tree) -> None:
    tree.device()
    tree.environment.update(AIOVERBS_SOFT_DIRECT="no", AIOVERBS_SOFT_SECRET="open sesame")
    done = invoke()
    assert done.exit_code == 0, "the exit status is about RDMA devices"
    assert "soft0  unusable\n  error: the software device cannot be opened: AIOVERBS_SOFT_DIRECT: " in done.output
    assert "\n      unset AIOVERBS_SOFT_DIRECT\n" in done.output
    assert "open sesame" not in done.output + invoke("--json").output


@pytest.mark.parametrize(
    ("ways", "text"),
    [
        (Ways(rings=True, direct=True), "requests through shared memory, data by one copy"),
        (
            Ways(why_not_rings="no memory", why_not_direct="no access"),
            "requests through sockets (no memory), data with the requests (no access)",
        ),
        (Ways(problem="no port"), "unknown, for a trial failed: no port"),
    ],
)
def test_ways_to_other_processes(tree: Tree, ways: Ways, text: str) -> None:
    tree.probe = replace(tree.probe, ways=ways)
    assert f"\n  to other processes: {text}\n" in invoke().output
    assert json.loads(invoke("--json").output)["machine"]["probe"]["ways"]["rings"] == ways.rings


@pytest.mark.parametrize(
    ("arguments", "status"), [([], 0), (["rxe0"], 0), (["rxe1"], 1), (["mlx5_0"], 3), (["rxe0", "rxe1"], 2)]
)
def test_exit_status(tree: Tree, arguments: list[str], status: int) -> None:
    tree.device("rxe0")
    tree.device("rxe1", uverbs="uverbs1", trial=Trial("ibv_create_qp failed"))
    assert invoke(*arguments).exit_code == status


def test_status_1_if_no_device_is_usable(tree: Tree) -> None:
    tree.device(state="1: DOWN", physical="3: Disabled")
    done = invoke()
    assert done.exit_code == 1
    assert "rxe0  unusable\n  port 1: DOWN, Ethernet, eth0\n    GID 0: fe80:" in done.output
    assert "  error: port 1 is DOWN (Disabled): eth0 is down\n      sudo ip link set eth0 up\n" in done.output


def test_a_provider_that_does_not_load_is_not_listed(tree: Tree) -> None:
    tree.device()
    for name in ("mlx5", "rxe"):
        tree.write(f"etc/libibverbs.d/{name}.driver", f"driver {name}")
    warning = "libibverbs: Warning: couldn't load driver 'librxe-rdmav34.so': no such file"
    tree.probe = replace(tree.probe, listed=(), trials={}, warnings=(warning,))
    done = invoke()
    assert "\nproviders: mlx5\n" in done.output
    assert "(installed providers: mlx5)" in done.output


def test_json(tree: Tree) -> None:
    tree.device()
    tree.device("rxe1", uverbs="uverbs1", gids={}, netdev="eth1")
    done = invoke("--json")
    result = json.loads(done.output)
    assert done.exit_code == result["status"] == 0
    assert (result["usable"], result["unusable"]) == (["rxe0"], ["rxe1"])
    (finding,) = result["findings"]
    assert (finding["code"], finding["severity"], finding["subject"]) == ("no-gid", "error", "rxe1")
    assert finding["commands"] == ["sudo ip address add 192.0.2.1/24 dev eth1"]
    assert result["machine"]["devices"][0]["ports"][0]["gids"][1]["index"] == 1


def test_colours_on_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert ESCAPE in run_on_terminal([*COMMAND, "doctor"], TERM="xterm")
    plain = run_on_terminal([*COMMAND, "doctor"], TERM="xterm", NO_COLOR="1")
    assert ESCAPE not in plain
    assert "soft0  usable" in plain
    done = subprocess.run([*COMMAND, "doctor"], env=environment(), capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode in (0, 1, 3)
    assert done.stdout == plain.replace("\r\n", "\n")


class TestProbe:
    """Tests of the process that tests this machine's libraries, whatever is installed."""

    def test_result_agrees_with_this_process(self) -> None:
        found = machine.probe()
        assert found.crash is None
        problem = None
        try:
            handles.table_slot("open_device")
        except LibraryNotFoundError as error:
            problem = error.reason
        assert found.libibverbs.problem == problem
        assert problem is not None or Path(found.libibverbs.path or "").is_file()

    def test_a_library_that_prints(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lines that they print, by C or by Python, are no part of the result."""
        (tmp_path / "sitecustomize.py").write_text(
            "import atexit, ctypes\n"
            "atexit.register(print, 'from Python')\n"
            "atexit.register(ctypes.CDLL(None).puts, b'from C')\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        found = machine.probe()
        assert found.crash is None
        assert {"from Python", "from C"} <= set(found.warnings)

    @pytest.mark.parametrize("works", [True, False])
    def test_ways_to_other_processes(self, monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
        monkeypatch.setenv("AIOVERBS_SOFT_RINGS", str(int(works)))
        monkeypatch.setenv("AIOVERBS_SOFT_DIRECT", "0")
        monkeypatch.setenv("AIOVERBS_SOFT_ADDRESS", "127.0.0.1:7470")  # the processes do not both listen there
        ways = machine.probe().ways
        assert ways is not None
        assert (ways.problem, ways.rings) == (None, works)
        assert ways.why_not_rings == ("" if works else "AIOVERBS_SOFT_RINGS is 0")
        assert ways.why_not_direct == "AIOVERBS_SOFT_DIRECT is 0"

    def test_a_second_process_that_fails_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local_peer, "_PROGRAM", "aioverbs.cli.no_such_module")
        with pytest.raises(ChildProcessError, match="ended before it listened"):
            asyncio.run(local_peer.find_ways())

    def test_a_libibverbs_that_lacks_a_verb(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING, "aioverbs")  # also restores the level, which the probe changes

        def lacks() -> list[str]:
            raise LibraryNotFoundError("libibverbs.so.1", "undefined symbol: ibv_reg_mr", outdated=True)

        monkeypatch.setattr(probe, "_library", lambda name: {"path": name, "version": "30.0"})
        monkeypatch.setattr(hardware, "listed", lacks)
        monkeypatch.setattr(probe, "load_librdmacm", lambda: None)
        out = io.StringIO()
        probe.main(out)
        found = machine.parse_probe(out.getvalue())
        problem = "undefined symbol: ibv_reg_mr"
        assert found.libibverbs == machine.Library("libibverbs.so.1", "30.0", problem, outdated=True)
        assert (found.librdmacm.problem, found.listed, found.trials) == (None, (), {})

    def test_a_librdmacm_that_lacks_a_function(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING, "aioverbs")  # also restores the level, which the probe changes

        def lacks() -> None:
            raise LibraryNotFoundError("librdmacm.so.1", "undefined symbol: rdma_establish", outdated=True)

        monkeypatch.setattr(probe, "_library", lambda name: {"path": name, "version": "30.0"})
        monkeypatch.setattr(hardware, "listed", list)
        monkeypatch.setattr(probe, "load_librdmacm", lacks)
        out = io.StringIO()
        probe.main(out)
        found = machine.parse_probe(out.getvalue())
        problem = "undefined symbol: rdma_establish"
        assert found.librdmacm == machine.Library("librdmacm.so.1", "30.0", problem, outdated=True)
        assert found.libibverbs.problem is None

    def test_a_failure_to_list_the_devices(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING, "aioverbs")  # also restores the level, which the probe changes

        def fail() -> list[str]:
            raise VerbsError("ibv_get_device_list", errno.EPERM)

        monkeypatch.setattr(probe, "_library", lambda name: {"path": name, "version": "30.0"})
        monkeypatch.setattr(hardware, "listed", fail)
        out = io.StringIO()
        probe.main(out)
        found = machine.parse_probe(out.getvalue())
        assert (found.crash, found.libibverbs.problem, found.listed) == (None, None, ())
        assert found.list_problem is not None
        assert found.list_problem.startswith("ibv_get_device_list failed: EPERM")

    @pytest.mark.parametrize(
        ("script", "crash", "broken", "warnings"),
        [
            (
                "echo trouble >&2; kill -KILL $$",
                "ended with status -9",
                False,
                ("trouble",),
            ),  # a sanitizer cannot intercept SIGKILL
            ("exit 3", "ended with status 3", True, ()),
            (r"printf '\377 trouble\n' >&2; exit 3", "ended with status 3", True, ("\ufffd trouble",)),
            ("exec sleep 30", "did not end within 200 ms", False, ()),
        ],
    )
    def test_a_crash_is_reported(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        script: str,
        crash: str,
        broken: bool,
        warnings: tuple[str, ...],
    ) -> None:
        python = tmp_path / "python"
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        if "sleep" in script:
            monkeypatch.setattr(machine, "_PROBE_S", 0.2)
        found = machine.probe()
        assert (found.crash, found.broken, found.warnings) == (crash, broken, warnings)


def test_doctor_works_without_the_compiled_core() -> None:
    code = (
        "import sys; sys.modules['aioverbs._core.handles.handles'] = None; from aioverbs.cli.main import main; main()"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for arguments, statuses in ((["doctor", "--json"], (0, 1, 3)), (["devices"], (4,)), (["--help"], (0,))):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode in statuses
        assert done.stderr.count("\n") == (1 if arguments == ["devices"] else 0)
        assert ("aioverbs._core.handles.handles" in done.stderr) == (arguments == ["devices"])


def test_an_installation_without_the_compiled_core_is_found(tmp_path: Path) -> None:
    def compiled_core(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name.startswith("handles.") and name.endswith(".so")]

    shutil.copytree(Path(handles.__file__).parents[2], tmp_path / "aioverbs", ignore=compiled_core)
    path = [str(tmp_path), *filter(None, sys.path)]
    code = "from aioverbs.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    (finding,) = (each for each in json.loads(done.stdout)["findings"] if each["code"] == "aioverbs-broken")
    assert "ModuleNotFoundError: No module named 'aioverbs._core.handles.handles'" in finding["message"]
    assert finding["commands"] == ["pip install --force-reinstall --no-deps aioverbs"]
    assert "libibverbs1" not in done.stdout


def test_importing_aioverbs_does_not_import_click() -> None:
    code = "import sys, aioverbs; sys.exit(any(name.partition('.')[0] == 'click' for name in sys.modules))"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-P", "-c", code], env=env, check=False).returncode == 0
