"""The page of faults: every row, what it rests on, and what did not run."""

import re
from pathlib import Path

import pytest

from tests.faults import report
from tests.faults.fault import KINDS
from tests.faults.report import Case, cases_of, line_of, page
from tests.faults.rows import ROWS, Row

ROOT = Path(__file__).resolve().parents[2]
ROW = Row(7, "a fault", "a promise", ("tests/a.py::test_it",))


def test_rows_are_numbered_with_tests_or_reason() -> None:
    assert [row.number for row in ROWS] == list(range(1, len(ROWS) + 1))
    assert all(bool(row.tests) != bool(row.without) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.number))
def test_the_tests_of_a_row_exist(row: Row) -> None:
    for test in row.tests:
        file, name = test.partition("[")[0].split("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), test


def test_row_survives_when_every_test_case_passed() -> None:
    cases = {
        "tests/a.py::test_it[1]": Case("passed", figures=["2.0 s"]),
        "tests/a.py::test_it[2]": Case("passed", figures=["3.0 s"]),
        "tests/a.py::test_itself": Case("failed", "another"),
    }
    survived, line = line_of(ROW, cases)
    assert survived and line.split(" | ")[-3:-1] == ["yes", "2.0 s; 3.0 s"]
    cases["tests/a.py::test_it[2]"] = Case("xfailed", "not  yet\n")
    assert line_of(ROW, cases)[1].split(" | ")[3] == "no: not yet"
    assert line_of(ROW, {})[1].split(" | ")[3].startswith("no: tests/a.py::test_it")


def test_outcomes_and_figures_are_read_from_pytest(tmp_path: Path) -> None:
    (tmp_path / "ran.xml").write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.a" name="test_it[1]"><properties>
          <property name="figure" value="2 s"/>
          <property name="seconds_until_gone" value="0.12345"/></properties></testcase>
        <testcase classname="tests.a" name="test_no"><failure message="boom"/></testcase>
        <testcase classname="tests.a" name="test_later">
          <skipped type="pytest.xfail" message="not yet"/></testcase>
        </testsuite></testsuites>"""
    )
    found = cases_of(tmp_path / "ran.xml")
    assert found["tests/a.py::test_it[1]"] == Case(
        "passed", "", ["2 s", "seconds until gone: 0.123"]
    )
    assert found["tests/a.py::test_no"] == Case("failed", "boom")
    assert found["tests/a.py::test_later"] == Case("xfailed", "not yet")


def test_page_is_not_written_of_a_run_without_slow_tests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `pytest -m "not slow"` leaves it: a case of a test, and no other."""
    (tmp_path / "ran.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="test_it[1]"/></testsuite>'
        "</testsuites>"
    )
    every = ["tests/a.py::test_it[1]", "tests/a.py::test_it[slow]", "tests/a.py::test_its"]
    monkeypatch.setattr(report, "collected", lambda: every)
    monkeypatch.setattr(report, "ROWS", (ROW,))
    monkeypatch.setattr(report, "PAGE", tmp_path / "faults.md")
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path / "ran.xml")])
    assert report.main() == 1
    assert "1 tests did not run:\n  tests/a.py::test_it[slow]\n" in capsys.readouterr().err
    assert not report.PAGE.exists()
    every.pop(1)
    assert report.main() == 0 and "1 of 1 rows" in report.PAGE.read_text()


def test_page_lists_kinds_rows_and_measurements() -> None:
    soak = {
        "title": "SIGKILL at 2 random points", "command": "tools/faults.py kills", "machine": "m",
        "recovery_seconds_median": 9.5, "failures": ["x: exit code 1"],
    }  # fmt: skip
    text = page({}, [soak])
    assert all(f"| `{kind}" in text for kind in KINDS)
    assert all(f"| {row.number} | {row.fault}" in text for row in ROWS)
    assert f"0 of {len(ROWS)} rows" in text and "| 9.5 |" in text
    assert "except:\n- failed: x: exit code 1" in text
