"""The page about a run: complete, harmless, and made whatever the folder lacks."""

import json
import math
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from ppdist.config.experiment import load_config
from ppdist.config.parse import dump_yaml
from ppdist.metrics.run import read_run
from ppdist.report import page
from ppdist.report.content import changed_settings
from ppdist.report.page import write_report
from tests.errors import raises
from tests.forked import run_tool
from tests.unit.report.folders import NAMES, make_run, png_that_claims

REPOSITORY = Path(__file__).resolve().parents[3]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OWN = "document.title='owned'"
EVIL = f'</script><script>{OWN}</script><img src=x onerror="{OWN}">'
VOID = {"meta", "img", "input", "br", "hr", "link", "wbr"}


class Elements(HTMLParser):
    """What a page consists of; it fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.opened: list[str] = []
        self.feed(text)
        assert self.opened == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.opened.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.opened and self.opened.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def made(out: Path, run: Path) -> tuple[str, Elements]:
    write_report(run, out)
    text = out.read_text(encoding="utf-8")
    elements = Elements(text)
    for tag, attributes in elements.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href"):
                assert value and value.startswith(("#", "data:image/")), value
    assert "http-equiv" in text and "default-src 'none'" in text
    return text, elements


def test_the_page_shows_all_that_a_folder_says(tmp_path: Path) -> None:
    text, _ = made(tmp_path / "page.html", make_run(tmp_path / "run"))
    for heading in ("Curves", "Evaluation", "Plots", "Events", "Settings"):
        assert f">{heading}</h2>" in text
    for shown in (
        "0.5890",  # the best mAP
        "all 400 steps",
        "linear scaling by 1",
        "Confused most often",
        "right class, box too far off",
        "rank 1 1.50x",
        "<b>2 times</b>",
        *NAMES,
    ):
        assert shown in text, shown
    assert text.count("data:image/jpeg") == 4 and text.count("data:image/png") == 1


def test_the_page_holds_what_viz_has_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    drawn = {"pr_curve", "results", "confusion"}
    for name in drawn:
        shutil.copy(run / "plots/classes.png", run / f"plots/{name}.png")
    _, elements = made(tmp_path / "page.html", run)
    shown = {text.removeprefix("plots/") for text in elements.texts if text.startswith("plots/")}
    assert {f"{name}.png" for name in drawn} < shown


@pytest.mark.parametrize("browser", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_names_of_strangers_stay_text(tmp_path: Path, browser: bool) -> None:
    run = make_run(tmp_path / "run <b>&\"'", names=["RBC", EVIL, "a\u202eb\x1b[31m"])
    for name, edit in {
        "config.yml": lambda content: content["model"].update(pretrained=EVIL),
        "environment.json": lambda content: content.update({EVIL: [EVIL]}),
        "evaluation.json": lambda content: content["worst"][0].update(file=EVIL),
    }.items():
        content = json.loads((run / name).read_text(encoding="utf-8"))
        edit(content)
        (run / name).write_text(json.dumps(content), encoding="utf-8")
    record = {"time": 1_767_607_300, "step": 0, "derived": {EVIL: {"value": EVIL, "why": EVIL}}}
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        file.write(json.dumps({"step": 401, "finished": EVIL}) + "\n")
    with (run / "train.log").open("a", encoding="utf-8") as file:
        file.write(f"2026-01-05 10:05:01 WARNING {EVIL}\n")
    text, elements = made(tmp_path / "page.html", run)
    assert "<script>document" not in text and "<img src=x" not in text
    assert [attributes for tag, attributes in elements.tags if tag == "script"] == [{}]
    assert "\u202e" not in text and "\x1b" not in text
    if CHROMIUM and browser:
        assert "<title>owned" not in seen_by_browser(tmp_path / "page.html")


DAMAGES: dict[str, dict[str, str]] = {
    "nothing but a configuration": {"metrics.jsonl": "", "evaluation.json": "", "train.log": ""},
    "records cut short": {"metrics.jsonl": '{"step": 20, "loss": 1.5}\n{"step": 40, "lo'},
    "records of other kinds": {
        "metrics.jsonl": '[1]\n"x"\n{"step": "a"}\n{"loss": 1}\n{"step": 1, "loss": null}\n'
        '{"step": 2, "loss": NaN, "lr": Infinity}\n{"step": 3, "loss": 1e999, "epoch": true}\n'
        '{"step": 4, "rank_own_seconds": ["x", null], "rank_step_seconds": 3}\n'
        '{"step": 5, "derived": {"lr": 3, "steps": {"value": [[]]}}}\n'
        '{"step": 6, "rank_step_seconds": [], "rank_own_seconds": []}\n'
        '{"step": 7, "mAP": -1, "eval_seconds": 1}\n{"step": 8, "time": 1e18, "loss": 2}\n'
    },
    "an evaluation cut short": {"evaluation.json": '{"step": 3, "metrics": {"mA'},
    "an evaluation of other kinds": {
        "evaluation.json": '{"step": "x", "metrics": 3, "per_class": [{"name": 5}], "images": null,'
        '"curves": {"confidence_T": [0]}, "confusion": {"counts": [[1], [2, 3]]}, "errors": [],'
        '"worst": [{}], "class_names": [1]}'
    },
    "an evaluation of nothing": {
        "evaluation.json": '{"step": null, "images": 0, "class_names": [], "metrics": {}, '
        '"per_class": [], "curves": {"confidence_T": [], "precision_CT": [], "recall_CT": [], '
        '"f1_CT": [], "recall_R": [], "precision_CR": [], "curve_classes": [], "mean_f1_T": [], '
        '"mean_recall_T": [], "mean_precision_T": [], "mean_precision_R": []}, '
        '"confusion": {"counts": []}}'
    },
    "an evaluation with nulls": {
        "evaluation.json": '{"class_names": ["a", "b"], "per_class": [{"name": "a", "AP": null}, '
        '{"name": "b", "AP": -1}], "metrics": {"mAP": null, "AR100": NaN}, "curves": '
        '{"confidence_T": [0, 1], "precision_CT": [[null, null], [null, 1]], "recall_CT": '
        '[[null, null], [0, 1]], "f1_CT": [[null, null], [0, 1]], "recall_R": [0], '
        '"precision_CR": [[null], [null]], "curve_classes": [0, 9], "mean_f1_T": [null, null], '
        '"mean_recall_T": [0, 1], "mean_precision_T": [0, null], "mean_precision_R": [null]}, '
        '"errors": {"counts": {"missed": 1}}}'
    },
    "deeply nested": {
        "evaluation.json": "[" * 100_000,
        "environment.json": '{"a":' * 5000,
        "config.yml": "[" * 1000,
        "metrics.jsonl": "[" * 100_000,
    },
    "no text": {name: "\x00\x01\ufffd" for name in ("config.yml", "environment.json", "train.log")},
    "lists": {"config.yml": "- 1\n- 2\n", "environment.json": "[1]", "evaluation.json": "[]"},
}


def damaged_run(folder: Path, damage: str) -> Path:
    run = make_run(folder, pictures=False)
    for name, content in DAMAGES[damage].items():
        (run / name).write_text(content, encoding="utf-8")
    return run


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_still_makes_a_page(damage: str, tmp_path: Path) -> None:
    run = damaged_run(tmp_path / "run", damage)
    made(tmp_path / "one.html", run)
    if damage in ("an evaluation of nothing", "an evaluation with nulls"):
        assert read_run(run).problems == []  # that is what a set without objects says


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.yml", "environment.json", "train.log", "evaluation.json"]
)
def test_one_file_is_enough_for_a_page(name: str, tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", pictures=False)
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(whole / name, run)
    missing = write_report(run, tmp_path / "page.html")
    assert len(missing) == (0 if name == "evaluation.json" else 4)
    assert all("is not there" in each for each in missing)
    text, _ = made(tmp_path / "page.html", run)
    assert ("by ppdist eval" in text) == (name == "evaluation.json")


def test_a_folder_without_a_run_is_the_users_error(tmp_path: Path) -> None:
    with raises("run_not_found"):
        write_report(tmp_path / "none", tmp_path / "page.html")
    with raises("run_not_found", "metrics.jsonl"):
        write_report(tmp_path, tmp_path / "page.html")


def test_a_classifier_has_a_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", evaluation=False)
    records = [
        {"step": step, "epoch": step / 8, "top1": step / 50, "top5": 1.0, "eval_seconds": 0.1}
        for step in (8, 16, 24)
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run / "metrics.jsonl").write_text(text, encoding="utf-8")
    classes = [{"name": name, "images": 10, "top1": 0.5, "top5": 1.0} for name in NAMES]
    evaluation = {
        "step": 24,
        "images": 30,
        "class_names": NAMES,
        "metrics": {"top1": 0.48, "top5": 1.0},
        "per_class": classes,
        "confusion": {"counts": [[5, 5, 0], [5, 5, 0], [0, 5, 5]]},
    }
    (run / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    text, _ = made(tmp_path / "page.html", run)
    assert "best top1" in text and "0.4800" in text and ">top1</th>" in text
    assert ">background<" not in text


@pytest.mark.parametrize("count", [1, 16, 40, 80, pytest.param(1000, marks=pytest.mark.slow)])
def test_page_size_bounded_for_any_class_count(count: int, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", names=[f"类 {number}" for number in range(count)])
    text, _ = made(tmp_path / "page.html", run)
    assert len(text) < 1_500_000


def test_large_pictures_are_made_smaller(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret", encoding="utf-8")
    (run / "plots" / "val_batch_1.jpg").symlink_to(secret)
    noise_HW3 = np.random.default_rng(0).integers(0, 256, (1200, 2400, 3), dtype=np.uint8)
    cv2.imwrite(str(run / "plots" / "train_batch_1.jpg"), noise_HW3)
    assert (run / "plots" / "train_batch_1.jpg").stat().st_size > 1_500_000
    (run / "plots" / "results.png").write_bytes(png_that_claims(30_000, 30_000))
    (run / "plots" / "confusion.png").write_bytes(png_that_claims(9000, 9000))
    os.mkfifo(run / "plots" / "pr_curve.png")
    problems = write_report(run, tmp_path / "page.html")
    names = ["confusion.png", "pr_curve.png", "results.png", "val_batch_1.jpg"]
    assert len(problems) == len(names)
    assert all(f"{name} cannot be shown" in text for name, text in zip(names, sorted(problems)))
    assert (tmp_path / "page.html").stat().st_size < 2_500_000


def test_bases_of_a_configuration_are_not_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "secret.yml").write_text("password: hunter2\n", encoding="utf-8")
    for text in ("_BASE_: [../secret.yml]", '{"\\x5fBASE_": ../secret.yml}'):
        (run / "config.yml").write_text(f"{text}\n", encoding="utf-8")
        write_report(run, tmp_path / "page.html")
        assert "hunter2" not in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_settings_are_keys_that_are_not_default(tmp_path: Path) -> None:
    config = load_config(REPOSITORY / "configs/examples/demo.yml", ["seed=7"])
    (tmp_path / "config.yml").write_text(dump_yaml(config), encoding="utf-8")
    settings, why_none = changed_settings(read_run(tmp_path).config_tree)
    found = dict(settings)
    assert why_none == ""
    assert found["seed"] == "7" and found["evaluate.every_epochs"] == "4"
    assert "device" not in found and "log.every_steps" not in found


@pytest.mark.parametrize(
    ("ending", "steps", "status"),
    [
        ("total", 400, "all 400 steps"),
        ("early_stopping", 200, "stopped early after step 200 of 400"),
        ("signal", 200, "by a signal after step 200 of 400; --resume continues it"),
        ("", 200, "last record at step 200 of 400; --resume continues it"),
        ("", 400, "all 400 steps"),
    ],
)
def test_the_page_says_how_the_run_stands(
    ending: str, steps: int, status: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", pictures=False)
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if json.loads(line)["step"] <= steps and "finished" not in line]
    if ending:
        kept.append(json.dumps({"step": steps, "finished": ending}))
    (run / "metrics.jsonl").write_text("\n".join(kept), encoding="utf-8")
    text, _ = made(tmp_path / "page.html", run)
    assert status in text


def test_a_run_that_goes_on_is_called_running(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", pictures=False)
    code = f"import pathlib, ppdist.common.files as l; l.hold(pathlib.Path({str(run)!r}))"
    code += "; print('held', flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY
    )
    assert holder.stdin and holder.stdout
    try:
        assert holder.stdout.readline() == b"held\n"
        assert read_run(run).running
    finally:
        holder.stdin.close()
        holder.wait(30)
        holder.stdout.close()
    assert not read_run(run).running


def test_restarts_and_returns_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", pictures=False)
    records: list[dict[str, Any]] = [
        {"step": 200, "derived": {"steps": {"value": 400, "why": ""}}},
        {"step": 220, "returned_from_step": 240, "lr_factor": 0.5},
        {"step": 230, "bad_images": 3},
    ]
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    text, _ = made(tmp_path / "page.html", run)
    assert "Resumed from step 200." in text
    assert "from step 240 to" in text
    assert "3 images could" in text


def seen_by_browser(file: Path) -> str:
    """The document after its scripts ran; a message on the browser's console fails."""
    assert CHROMIUM
    command = [
        CHROMIUM, "--no-sandbox", "--headless=new", "--disable-gpu", "--dump-dom",
        "--enable-logging=stderr", f"--user-data-dir={file.parent / 'browser'}", file.as_uri(),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert "CONSOLE" not in ended.stderr, ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_runs_the_page_without_an_error(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    write_report(make_run(tmp_path / "run"), out)
    # The script shows this button, so it ran: the policy of the page has let it.
    assert '<button type="button" id="theme">' in seen_by_browser(out)


ACT = """
<script>
document.querySelectorAll("table.sortable th")[7].click();
document.querySelector(".gallery img").click();
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_script_sorts_and_enlarges(tmp_path: Path) -> None:
    write_report(make_run(tmp_path / "run"), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "Content-Security-Policy" not in line]
    (tmp_path / "acted.html").write_text("\n".join(lines).replace("</body>", ACT), encoding="utf-8")
    shown = seen_by_browser(tmp_path / "acted.html")
    assert '<figure class="large">' in shown
    table = shown.split('<table class="sortable">')[1].split("</table>")[0]
    aps = [float(cell.split("<svg")[0]) for cell in table.split('<td class="n">')[7::13]]
    assert len(aps) == 3 and aps == sorted(aps, reverse=True)


@pytest.mark.slow
def test_the_tool_writes_into_a_single_runs_folder(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, pictures=False) for name in ("a", "b")]
    shutil.rmtree(tmp_path / "a/plots", ignore_errors=True)

    def report(*arguments: object) -> subprocess.CompletedProcess[str]:
        return run_tool("report", *arguments, cwd=tmp_path)

    ended = report(runs[0])
    assert (ended.returncode, ended.stdout.split()[-1]) == (0, f"{runs[0] / 'report.html'}")
    ended = report(*runs)
    assert ended.returncode == 2 and "ppdist tune" in ended.stderr
    ended = report(tmp_path / "none")
    assert ended.returncode == 2 and "no such folder" in ended.stderr


def test_numbers_are_written_as_readers_expect() -> None:
    assert [page.number(value) for value in (None, 0.12345, 1234, 1234.5, "x")] == [
        "–", "0.123", "1,234", "1,234", "x",
    ]  # fmt: skip
    assert page.clock(math.nan) == "–" and page.clock(1e18) == "–"
