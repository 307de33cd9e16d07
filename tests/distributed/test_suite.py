"""The comparison of two runs of the tests of `distributed`."""

import os
from pathlib import Path

import pytest

from tests.distributed import suite
from tests.distributed.suite import Results, compare, copy_tests, parse, run, tabulate

REPORT = """<testsuites><testsuite>
<testcase classname="" name="test_a"/>
<testcase classname="tests.test_b" name="test_b[1]"><failure/></testcase>
<testcase classname="tests.test_b.TestIt" name="test_c"><skipped type="pytest.skip"/></testcase>
<testcase classname="tests.test_b" name="test_d"><error/></testcase>
<testcase classname="tests.test_b" name="test_d"/>
<testcase classname="tests.test_b" name="test_e"><skipped type="pytest.xfail"/></testcase>
</testsuite></testsuites>"""


def test_a_report_has_one_outcome_for_each_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert parse(report, "test_b") == {
        "test_b::test_a": "passed",
        "test_b::test_b[1]": "failed",
        "test_b::TestIt::test_c": "skipped",
        "test_b::test_d": "failed",
        "test_b::test_e": "xfailed",
    }


def test_what_tcp_passes_has_to_pass() -> None:
    theirs = {"a": "passed", "b": "failed", "c": "skipped", "d": "failed", "e": "passed", "f": "passed", "g": "passed"}
    ours = {"a": "failed", "b": "failed", "c": "failed", "d": "passed", "e": "skipped", "g": "xfailed", "new": "failed"}
    assert compare(ours, theirs) == ["a", "c", "e", "f", "new"]


def test_a_module_that_did_not_run_is_a_difference() -> None:
    passed = {"m::test_a": "passed"}
    assert [tabulate("m", *both, {})[1] for both in ((passed, passed), ({}, passed), (passed, {}), ({}, {}))] == [
        0, 1, 1, 1,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("outcomes", "count"), [({"a": "passed", "b": "skipped"}, 0), ({"a": "skipped"}, 1), ({}, 1), ({"a": "failed"}, 2)]
)
def test_the_checks_have_to_be_made(
    outcomes: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").touch()
    monkeypatch.setattr(suite, "copy_tests", lambda checkout: checkout)
    monkeypatch.setattr(suite, "outcomes_of_checks", lambda _: outcomes)
    monkeypatch.setattr(suite, "outcomes", lambda *_: {"test_x::test_a": "passed"})
    assert suite.main(tmp_path, ["test_x"], Results(tmp_path / "results", 10)) == count


def test_a_run_continues_where_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("x", "y"):
        (tmp_path / "tests" / f"test_{name}.py").touch()
    passed = {"test::test_a": "passed"}
    made: list[str] = []

    def outcomes(checkout: Path, tests: Path, scheme: str, limit_s: float) -> dict[str, str] | None:
        made.append(f"{tests.stem}-{scheme}")
        return None if limit_s < 60 else passed

    monkeypatch.setattr(suite, "copy_tests", lambda checkout: checkout)
    monkeypatch.setattr(suite, "outcomes_of_checks", lambda _: passed)
    monkeypatch.setattr(suite, "outcomes", outcomes)
    for modules, minutes, left, expected in (
        (["test_x"], 10, 0, ["test_x-tcp", "test_x-aioverbs"]),
        (["test_x", "test_y"], 0.5, 1, ["test_y-tcp", "test_y-aioverbs"]),  # the time is over during each
        (["test_x", "test_y"], 0, 1, []),
        (["test_x", "test_y"], 10, 0, ["test_y-tcp", "test_y-aioverbs"]),
    ):
        made.clear()
        assert suite.main(tmp_path, modules, Results(tmp_path / "results", minutes)) == left
        assert made == expected
        assert ("no time for 1 files" in capsys.readouterr().out) == bool(left)


def test_a_file_that_does_not_end_has_no_outcomes(tmp_path: Path) -> None:
    results = Results(tmp_path, 1000)
    for _ in range(2):
        assert results.get("test_x", lambda _: None) == {}


def test_a_reason_is_for_all_parameters_of_a_test_of_one_module() -> None:
    theirs = {"m::test_a[1]": "passed", "n::test_a[1]": "passed"}
    lines, unknown = tabulate("m", theirs, {}, {"m::test_a": "names TCP"})
    assert [line.split("|")[-2].strip() for line in lines[1:]] == ["names TCP", "UNKNOWN"]
    assert unknown == 1


def test_a_run_that_does_not_end_is_killed_with_its_processes(tmp_path: Path) -> None:
    held = tmp_path / "held"  # by the child of the run, as long as it lives
    os.mkfifo(held)
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    assert not run(["sh", "-c", "sleep 1000 > held & wait"], tmp_path, {}, limit_s=1)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_folder_without_tests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no tests"):
        copy_tests(tmp_path)
