"""A dry run on a terminal of 30 lines of 80 columns, and in a pipe."""

import sys

import pytest

from ppdist.cli.screen import Screen

DECISIONS = [
    ("data", "yolo, 25 images", "/data/set"),
    *((f"model.key_{number}", "[160, 160]", "for a reason " * 6) for number in range(8)),
    ("train.phases_for_epochs", "300", "warm-up and other phases keep their fractions"),
    ("schedule.warmup_epochs", "10", "of 300: one in 30 of the run"),
    ("checkpoint.every_epochs", "15", "as often as evaluations"),
    *((f"optimizer.key_{number}", "3", "-o") for number in range(5)),
    ("test split: not used in training", "", "later: `ppdist eval -w RUN --split test`"),
]
PROBLEMS = [f"warning: kind_{number}: 3 in train: {'of boxes ' * 9}" for number in range(9)]
CHECK = "ppdist data check /data/set"
WARNINGS = [f"advice {number}: {'and why ' * 30}(docs/distributed.md)" for number in range(4)]
END = ["time: about 2h", "wrote output/run/recipe.yml", "to train: ppdist train"]


def print_all() -> None:
    screen = Screen()
    screen.print_decisions(DECISIONS)
    screen.print_short([f"{split}: /data/set/{split}: 25 images" for split in ("train", "val")])
    screen.print_problems([*PROBLEMS, "note: kind: 1 in val"], CHECK)
    screen.print(["ok: both splits can be used"])
    screen.print_end(WARNINGS, END)


def test_dry_run_with_many_warnings_fits_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    print_all()
    lines = capsys.readouterr().out.splitlines()
    assert sum(-(-len(line) // 80) for line in lines) <= 30
    table = "\n".join(lines)
    assert f"5 more warnings, 1 note: `{CHECK}`" in lines and lines[-3:] == END
    assert "also set: checkpoint.every_epochs 15, train.phases_for_epochs 300" in table
    assert "`ppdist eval -w RUN --split test`" in table and "advice 0" in table
    assert "1 more warning: the same with `| cat` shows all" in lines


@pytest.mark.parametrize("problems", [PROBLEMS, []])
def test_dry_run_in_a_pipe_is_whole(problems, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PROBLEMS", problems)
    print_all()
    text = capsys.readouterr().out
    assert all(reason in text for _, _, reason in DECISIONS)
    assert all(f"{line}\n" in text for line in (*problems, *(f"warning: {w}" for w in WARNINGS)))
    assert " ..." not in text and "also set" not in text and "| cat" not in text
