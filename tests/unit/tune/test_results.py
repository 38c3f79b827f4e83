"""Tables of studies: what they compare, and what they do not claim."""

import json
from pathlib import Path
from typing import Any

import pytest

from ppdist.tune import results
from ppdist.tune.results import ablations, ranking, read_rows, write_into
from tests.errors import raises
from tests.unit.tune.studies import row, seeds_of


def lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The cells of the table's rows."""
    text = ablations(rows).splitlines()
    assert text[0].startswith("**cells**: `configs/x.yml` with `train.epochs=4`, 4 minutes a trial")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text[4:]]


PLAIN = seeds_of("plain", 0.50, 0.52, 0.51)


def test_differences_are_of_the_same_seeds() -> None:
    table = lines(PLAIN + seeds_of("mal", 0.53, 0.55, 0.55))
    assert table[0] == ["plain", "", "3", "9.5", "4.0", "0.5100 ± 0.0100", "0.5200", "", ""]
    # Differences 0.03 0.03 0.04: mean 0.0333, deviation 0.00577; 4.30 * 0.00577 / sqrt(3) = 0.0143
    assert (
        table[1][-2:] == ["+0.0333 ± 0.0143 against plain", "better"] and table[1][1] == "`a.b=1`"
    )


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.45, 0.47, 0.47), "worse"),
        ((0.51, 0.60, 0.52), "better with every seed, but not surely"),
        ((0.49, 0.60, 0.50), "no difference shown"),
        ((0.60, 0.62), "too few seeds"),
        ((0.60,), "one seed shows nothing"),
    ],
)
def test_a_verdict_says_no_more_than_the_seeds_show(values: tuple, verdict: str) -> None:
    assert lines(PLAIN + seeds_of("mal", *values))[1][-1] == verdict


def test_of_a_loss_lower_is_better() -> None:
    rows = PLAIN + seeds_of("mal", 0.45, 0.47, 0.47)
    assert lines([{**each, "lower_is_better": True} for each in rows])[1][-1] == "better"


def test_failures_are_shown_not_counted() -> None:
    bad = [row("odd", 0, 0.9, state="fail"), row("mal", 0, 0.9, state="pruned")]
    table = lines(PLAIN + bad)
    assert [cells[0] for cells in table] == ["plain", "odd"]
    assert table[1][5] == "failed"


def test_a_repeated_seed_counts_once(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    first.write_text("".join(json.dumps(each) + "\n" for each in PLAIN), encoding="utf-8")
    later = seeds_of("plain", 0.6) + seeds_of("mal", 0.53)
    second.write_text("".join(json.dumps(each) + "\n" for each in later), encoding="utf-8")
    table = lines([*read_rows(first), *read_rows(second)])
    assert table[0][2] == "3" and table[1][-2] == "-0.0700 against plain"


def test_other_conditions_have_other_tables() -> None:
    other = [{**each, "minutes_per_trial": 3} for each in seeds_of("mal", 0.6, 0.6, 0.6)]
    text = ablations(PLAIN + other)
    assert text.count("**cells**") == 2 and "better" not in text
    assert "4 minutes a trial" in text and "3 minutes a trial" in text


def test_a_setting_is_compared_with_its_base() -> None:
    ten = seeds_of("mal", 0.53, 0.55, 0.55)
    fifty = [{**each, "setting": "odd", "base": "mal"} for each in seeds_of("mal", 0.4, 0.4, 0.4)]
    table = lines(PLAIN + [{**each, "base": "mal"} for each in ten] + fifty)
    assert table[1][-2:] == ["", ""]  # itself
    assert table[2][-2:] == ["-0.1433 ± 0.0287 against mal", "worse"]
    assert lines([*fifty])[0][-2] == "no seed in common against mal"


def test_the_quantiles_of_student_are_those_of_the_books() -> None:
    known = {1: 12.71, 10: 2.228, 11: 2.201, 15: 2.131, 30: 2.042, 120: 1.980}
    for degrees, value in known.items():
        assert results._quantile(degrees) == pytest.approx(value, abs=0.003)


def test_the_ranking_has_the_best_first() -> None:
    rows = [*PLAIN, row("mal", 7, 0.9), row("odd", 8, 0.95, state="pruned")]
    text = ranking(rows).splitlines()
    assert text[0] == "cells: 4 complete, 1 pruned"
    assert text[3].split()[:3] == ["7", "complete", "0.9000"]
    assert text[-1] == "best: trial 007: -o a.b=1"


def test_a_table_replaces_what_stood_between_the_markers(tmp_path: Path) -> None:
    file = tmp_path / "recipes.md"
    file.write_text(
        "before\n<!-- ablations -->\nold\n<!-- end of the ablations -->\nafter\n", encoding="utf-8"
    )
    write_into(file, "new")
    write_into(file, "newer")
    assert file.read_text(encoding="utf-8") == (
        "before\n<!-- ablations -->\n\nnewer\n\n<!-- end of the ablations -->\nafter\n"
    )
    file.write_text("nothing", encoding="utf-8")
    with raises("document_marks_missing"):
        write_into(file, "new")


def test_a_file_that_is_no_study_is_named(tmp_path: Path) -> None:
    with raises("study_not_found"):
        read_rows(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n', encoding="utf-8")
    with raises("not_a_study_row", "x.jsonl:1"):
        read_rows(tmp_path / "x.jsonl")
