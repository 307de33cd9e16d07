"""The choice of tests for a mutant, and how they are run."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("tree_sitter_c", reason="nox -s mutate installs it")

import psutil

from tests.conftest import ROOT
from tests.mutation.reach import Reach, Unit
from tests.mutation.trial import in_turn
from tests.running import run, wait_for_ends


def test_tests_of_all_files_are_chosen_in_turn() -> None:
    units = {"a": {"a1": 3.0, "a2": 1.0, "a3": 2.0}, "b": {"b1": 0.5, "b2": 8.0}}
    assert in_turn(units, 100) == ["b1", "b2", "a2", "a3", "a1"]
    assert in_turn(units, 2) == ["b1", "a2"]
    assert in_turn(units, 4) == ["b1", "a2", "a3"]
    assert in_turn(units, -1) == ["b1"]
    assert in_turn({}, 1) == []


def test_finding_the_tests_that_reach_a_line(tmp_path: Path) -> None:
    reach = Reach(tmp_path)
    lines = {"count: return 1": [1], "count: return 2": [], "count: use()": None, "other: use()": [0]}
    reach.add("tests/test_a.py", Unit({"first": 1.0, "second": 2.0}, {"a.py": lines}))
    reach.add("test_b", Unit({"test_b": 3.0}, {"a.py": {"count: return 2": []}}))
    for again in (reach, Reach(tmp_path)):
        names = list(again.units)

        def covering(key: str, again: Reach = again, names: list[str] = names) -> dict[str, dict[str, float]]:
            return again.covering("a.py", key, names)

        assert covering("count: return 1") == {"tests/test_a.py": {"second": 2.0}}
        assert covering("count: return 2") == {}, "no test reaches the line"
        assert covering("count: use()") == {"tests/test_a.py": {"first": 1.0, "second": 2.0}}
        assert covering("count: second line of a statement") == {"tests/test_a.py": {"first": 1.0, "second": 2.0}}
        assert covering("third: use()") == {}
        assert again.covering("a.py", "count: return 1", ["test_b"]) == {}


ALONE = f"""
import sys
sys.path.append({str(ROOT)!r})
from pathlib import Path
from tests.mutation.processes import become_subreaper, run_alone
become_subreaper()
code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE).pid)"
print(run_alone([sys.executable, "-c", code], 30, cwd=Path()))
print(run_alone([sys.executable, "-c", "print('begins', flush=True); input()"], 0.5, cwd=Path()).status)
print(run_alone([sys.executable, "-c", "import time; time.sleep(100)"], 0.5, cwd=Path()).status)
"""


def test_descendants_of_a_broken_program_are_killed() -> None:
    done = run([sys.executable, "-P", "-c", ALONE], 60)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first.startswith("Ended(status=0")
    assert (second, third) == ("1", "None"), "standard input is empty, and the descendant was killed"
    left = int(first.partition("output='")[2].partition("\\n")[0])
    wait_for_ends([left])
    assert not psutil.pid_exists(left)
