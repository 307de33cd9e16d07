"""Run the tests in random order on a busy machine until each has passed several times in a row.

    python tests/flaky/run.py --passes 3 --minutes 60 --results results.jsonl [-- PYTEST ARGUMENTS]

Beside the tests there are two busy processes for each processor, and random processes of the run, the workers of
pytest-xdist among them, are stopped for 300 ms. Results are appended to a file: the next run goes on from there. The
run ends when each test has passed often enough since it last failed, or when the time is over. The exit status is 0
if each test has passed as often as it is to, else 1; 2 if pytest did not run.
"""

import argparse
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

# Run as a script: import the project's packages from its root.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.flaky.disturbances import Stopper, busy_processes
from tests.flaky.plugin import Round
from tests.flaky.results import Result, next_round, passes_in_a_row, read_results

PYTEST = (sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider")
PROCESSORS = os.cpu_count() or 1
ROUND = ("-q", "--no-header", "--tb=short", "--dist=worksteal")
TIMEOUT = ("-o", "timeout=300")  # for tests that set none, on a machine that is five times slower than usual
STOP_S = 0.3
PAUSE_S = 0.5
GRACE_S = 1800.0  # for collecting, and for the tests that have begun when the time is over


class PytestError(Exception):
    """pytest ended in another way than by passed or failed tests."""


def collect(arguments: Sequence[str]) -> list[str]:
    """Return the node IDs of all tests.

    :raises PytestError: pytest did not collect them; the message is its output.
    """
    command = [*PYTEST, "--collect-only", "-q", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise PytestError(done.stdout)
    listed = done.stdout.partition("\n\n")[0].splitlines()
    return [line for line in listed if "::" in line]


def run_round(tests: list[str], seconds: float, options: argparse.Namespace, seed: int) -> int:
    """Run tests under disturbances and return how often a process was stopped.

    :raises PytestError: pytest itself failed.
    """
    with tempfile.TemporaryDirectory(prefix="flaky-") as name:
        exempt = Path(name, "exempt")
        exempt.mkdir()
        round_ = Round(tests, seconds, str(options.results.resolve()), str(exempt), STOP_S)
        plan = Path(name, "round.json")
        plan.write_text(json.dumps(dataclasses.asdict(round_)))
        env = {**os.environ, "AIOVERBS_TEST_ROUND": str(plan)}
        limit_s = seconds + GRACE_S
        workers = [f"--numprocesses={options.workers}"]
        with (
            busy_processes(options.busy * PROCESSORS, limit_s),
            subprocess.Popen(
                [*PYTEST, *ROUND, *workers, *TIMEOUT, *options.arguments], env=env, process_group=0
            ) as process,
            Stopper(process.pid, STOP_S, PAUSE_S, exempt, seed) as stopper,
        ):
            try:
                status = process.wait(limit_s)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)  # pytest-xdist's workers, too
                raise
    if status not in (0, 1, 5):  # 5: the time was over before the first test
        raise PytestError(f"pytest ended with status {status}")
    return stopper.stops


def summary(tests: Sequence[str], results: Sequence[Result], wanted: int) -> str:
    """Describe how often tests have passed in a row, and each failure that was seen."""
    passes = passes_in_a_row(results)
    counts = Counter(min(passes.get(test, 0), wanted) for test in tests)
    lines = [f"{counts[each]:6d} tests have passed {each} times in a row" for each in range(wanted + 1)]
    lines[-1] += " or more"
    failures = Counter(result.test for result in results if not result.passed)
    runs = Counter(result.test for result in results)
    lines += [
        f"failed {count} of {runs[test]} times, passed {passes[test]} times since: {test}"
        for test, count in failures.most_common()
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests in random order on a busy machine, again and again.")
    parser.add_argument("--passes", type=int, default=3, help="how often each test is to pass in a row (3)")
    parser.add_argument("--minutes", type=float, default=60.0, help="when to begin no further test (60)")
    parser.add_argument("--busy", type=int, default=2, help="how many busy processes for each processor (2)")
    parser.add_argument("--workers", type=int, default=2 * PROCESSORS, help="how many run tests (2 for each processor)")
    parser.add_argument("--results", type=Path, required=True, help="the file that collects the results")
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier runs")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32), help="of order and stops")
    parser.add_argument("arguments", nargs="*", metavar="PYTEST ARGUMENT", help="after --")
    options = parser.parse_args()
    # so that child processes are ended, too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    until = time.monotonic() + 60 * options.minutes
    if options.fresh:
        options.results.unlink(missing_ok=True)
    try:
        tests = collect(options.arguments)
        stops, seed = 0, options.seed
        while (left_s := until - time.monotonic()) > 0:
            chosen = next_round(tests, passes_in_a_row(read_results(options.results)), options.passes, seed)
            if not chosen:
                break
            print(f"{len(chosen)} of {len(tests)} tests, seed {seed}", flush=True)
            stops += run_round(chosen, left_s, options, seed)
            seed += 1
    except PytestError as error:
        print(error, file=sys.stderr)
        return 2
    results = list(read_results(options.results))
    print(f"processes were stopped {stops} times\n{summary(tests, results, options.passes)}")
    passes = passes_in_a_row(results)
    return int(any(passes.get(test, 0) < options.passes for test in tests))


if __name__ == "__main__":
    sys.exit(main())
