"""Runs of pytest on a copy of the project."""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.flaky.plugin import Round
from tests.flaky.results import Result, read_results
from tests.mutation.processes import Ended, run_alone
from tests.mutation.workspace import Workspace

__all__ = ["collect", "run_tests"]

COLLECT_LIMIT_S = 600.0
# Native programs run without pytest; tests that need a compiler are about builds.
MARKED = "not rdma and not slow and not toolchain"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-m", MARKED)
HANG_S = 120.0  # for collecting, and for the test in progress when the time is over


def _environment(workspace: Workspace) -> dict[str, str]:
    return {
        "AIOVERBS_TEST_LOOPS": "asyncio",
        "PYTHONPATH": str(workspace.tree),
        # a mutated file has the size, and may have the mtime, of the original, so stale bytecode would be used
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(workspace.tree / ".hypothesis"),
    }


def collect(workspace: Workspace, files: Sequence[str]) -> list[str]:
    """Return the node IDs of the tests of files or folders; none if they cannot be collected."""
    command = [*PYTEST, "--collect-only", *files]
    listed = run_alone(command, COLLECT_LIMIT_S, cwd=workspace.tree, env=_environment(workspace)).output
    return [line for line in listed.partition("\n\n")[0].splitlines() if "::" in line]


def run_tests(
    workspace: Workspace,
    tests: Sequence[str],
    seconds: float,
    *arguments: str,
    env: Mapping[str, str] | None = None,
) -> tuple[list[Result], Ended]:
    """Run tests in the given order. Return the results of those that ended, and how pytest ended.

    :param tests: their node IDs.
    :param seconds: after this time no further test begins; collecting does not count.
    :param arguments: further arguments for pytest.
    :param env: variables in addition to those of this process.
    """
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        exempt, plan, results = Path(name, "exempt"), Path(name, "round.json"), Path(name, "results.jsonl")
        exempt.mkdir()
        round_ = Round(list(tests), seconds, str(results), str(exempt), 0.0)
        plan.write_text(json.dumps(dataclasses.asdict(round_)))
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        command = [*PYTEST, f"--basetemp={name}/temporary", *arguments, *files]
        env = {**_environment(workspace), "AIOVERBS_TEST_ROUND": str(plan), **(env or {})}
        ended = run_alone(command, seconds + HANG_S, cwd=workspace.tree, env=env)
        return list(read_results(results)), ended
