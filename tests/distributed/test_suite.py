"""The comparison of two runs of the tests of `distributed`."""

from pathlib import Path

from tests.distributed.suite import compare, parse

REPORT = """<testsuites><testsuite>
<testcase classname="" name="test_a"/>
<testcase classname="tests.test_b" name="test_b[1]"><failure/></testcase>
<testcase classname="tests.test_b" name="test_c"><skipped/></testcase>
<testcase classname="tests.test_b" name="test_d"><error/></testcase>
<testcase classname="tests.test_b" name="test_d"/>
</testsuite></testsuites>"""


def test_a_report_has_one_outcome_for_each_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert parse(report) == {
        "::test_a": "passed",
        "test_b::test_b[1]": "failed",
        "test_b::test_c": "skipped",
        "test_b::test_d": "failed",
    }


def test_only_failures_that_tcp_does_not_have_are_differences() -> None:
    theirs = {"a": "passed", "b": "failed", "c": "skipped", "d": "failed"}
    ours = {"a": "failed", "b": "failed", "c": "failed", "d": "passed", "new": "failed"}
    assert compare(ours, theirs) == ["a", "c", "new"]
