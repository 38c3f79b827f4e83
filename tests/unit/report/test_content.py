"""The verdict of a run."""

from pathlib import Path

from ppdist.metrics.run import read_run
from ppdist.report.content import judge_if_ended
from ppdist.report.page import write_report
from tests.unit.report.folders import make_run


def test_the_verdict_of_a_run_is_on_its_page_and_not_while_it_runs(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    assert judge_if_ended(run)[0].code in ("learned", "partly_learned")
    page = write_report(tmp_path / "run", tmp_path / "page.html")
    assert page == [] and judge_if_ended(run)[0].text in (tmp_path / "page.html").read_text("utf-8")
    run.running = True
    assert judge_if_ended(run) == []
