"""The table of a study: a line for each setting, the best first."""

from pathlib import Path

from ppdist.lab.tune.results import rank_settings, read_rows
from tests.errors import raises
from tests.unit.lab.tune.studies import row, seeds_of

PLAIN = seeds_of("plain", 0.50, 0.52, 0.51)


def test_a_setting_has_the_mean_of_its_seeds() -> None:
    best, plain = rank_settings([*PLAIN, *seeds_of("mal", 0.53, 0.55)])
    assert plain.cells() == [
        "plain", "000 001 002", "3 complete", "9.5", "4.0", "0.5100 ± 0.0100", "0.5200",
    ]  # fmt: skip
    assert (best.name, best.overrides) == ("mal", ["a.b=1"])


def test_complete_settings_come_first_and_failed_ones_last() -> None:
    rows = [
        row("odd", 3, 0.9, state="fail", final={}, best={}, why="exit code 2"),
        row("mal", 4, 0.95, state="pruned"),
        row("plain", 5, 0.0, state="fail", final={}, best={}),
        *PLAIN,
    ]
    settings = rank_settings(rows)
    assert [setting.name for setting in settings] == ["plain", "mal", "odd"]
    assert settings[0].cells()[2:] == [
        "1 fail, 3 complete", "9.5", "4.0", "0.5100 ± 0.0100", "0.5200",
    ]  # fmt: skip
    assert settings[1].cells()[5] == "0.9500" and not settings[1].is_complete
    assert "exit code 2" in settings[2].cells()[2] and not any(settings[2].cells()[3:])


def test_of_a_loss_lower_is_better() -> None:
    rows = [*PLAIN, *seeds_of("mal", 0.45)]
    assert rank_settings([{**each, "lower_is_better": True} for each in rows])[0].name == "mal"


def test_a_point_of_a_search_is_a_setting() -> None:
    rows = [row("lr=0.1", 0, 0.5, params={"lr": 0.1}, variant_overrides=[])]
    assert rank_settings(rows)[0].overrides == ["lr=0.1"]


def test_a_file_that_is_no_study_is_named(tmp_path: Path) -> None:
    with raises("study_not_found"):
        read_rows(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n', encoding="utf-8")
    with raises("not_a_study_row", "x.jsonl:1"):
        read_rows(tmp_path / "x.jsonl")
