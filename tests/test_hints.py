"""Commands, options, keys and figures that our texts name are those of the package."""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import inspect
import pickle
import re
import sys
from collections.abc import Callable, Iterable

import numpy as np
import pytest

import ppdist
from ppdist import Detections, Detector, api, evaluate, export, train
from ppdist.cli.config import format_listing, list_models
from ppdist.config.migration import table
from ppdist.models.zoo import zoo
from tests.errors import raises
from tests.source_tree import REPOSITORY as ROOT
from tests.typed import Refused, Typed, answers, check, heads, key_answers, messages, pages
from tools.docs import models_text

ROW = re.compile(r"^\| `([^`]+)` \| `([^`:]+)` \|", re.M)


def refusals(typed: Iterable[Typed]) -> tuple[int, list[str]]:
    """How many commands, options and keys there were, and what is wrong with which."""
    tried, wrong = 0, {}
    for each in dict.fromkeys(typed):
        try:
            tried += check(each)
        except (Refused, ValueError) as error:
            wrong[f"{each.place}: {error}"] = None
    return tried, [*wrong]


@pytest.mark.parametrize(
    ("texts", "least"),
    [(pages, 1000), (heads, 50), (messages, 1000), (answers, 300), (key_answers, 50)],
)
def test_what_a_text_types_works(
    texts: Callable[[], Iterable[Typed]], least: int, record_property: Callable[[str, object], None]
) -> None:
    tried, wrong = refusals(texts())
    record_property("tried", tried)
    print(f"{texts.__name__}: {tried} commands, options and keys")
    assert not wrong, "\n".join(wrong)
    assert tried > least


@pytest.mark.parametrize("page", ["from_ultralytics", "from_paddledetection"])
def test_keys_of_other_trainers_are_those_that_messages_name(page: str) -> None:
    rows = ROW.findall((ROOT / f"docs/{page}.md").read_text("utf-8"))
    ours = {name: each.key for name, each in {**table().keys, **table().words}.items() if each.key}
    named = {theirs: key for theirs, key in rows if theirs in ours}
    assert len(named) > 5
    assert named == {theirs: ours[theirs] for theirs in named}


@pytest.mark.parametrize("page", ["which_model", "which_model_zh"])
def test_figures_of_models_are_those_of_config_list(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text("utf-8")
    assert text == models_text(page), "run `make docs`"
    rows = re.findall(r"^\| `(\w+)` \| (\d\S* \|.*) \|$", text, re.M)
    listed = {line.split()[0]: line.split() for line in format_listing().splitlines() if line}
    assert len(rows) > 40
    assert {name: cells.split(" | ") for name, cells in rows} == {
        name: listed[name][1:-1] for name, _ in rows
    }


def test_published_figures_of_models_are_those_of_the_zoo() -> None:
    rows = {row.weights: row for row in list_models() if row.weights != "-"}
    assert len(rows) > 30
    for name, row in rows.items():
        entry = zoo()[name]
        assert entry.published is not None and entry.parameters is not None
        assert row.ap == f"{entry.published:.1f}"
        # Counted as it trains: the layers of an export are merged, and some publishers round.
        if row.name.endswith("_auxhead"):  # they left out the auxiliary head
            continue
        assert row.parameters != "-" and 0.9 < float(row.parameters) / entry.parameters < 1.25


def test_the_check_notices_what_fails() -> None:
    for words in (
        "ppdist trian -c x.yml",
        "ppdist eval --split test",
        "ppdist data check D --quick",
        "ppdist train DATA --model yolo5n",
        "ppdist train DATA --model yolov5n --weights yolov5_coco",
        "ppdist train -c yolov5n -o optimizer.name=AdamW",
        "fleetrun --nproc_per_node 2 ppdist train -c x.yml --evla",
        "fleetrun --node_rank 1 ppdist train -c x.yml",
        "train.epoch: 3",
        "-o train.epochs=-1",
        "--image-sise 640",
    ):
        with pytest.raises(Refused):
            check(Typed("", words))
    launched = "fleetrun --nproc_per_node 2 ppdist train -c x.yml --eval"
    assert check(Typed("", launched)) == 1


# --- Python ---

FOUND = Detections(
    np.zeros((0, 4)), np.zeros(0), np.zeros(0, int), ("a",), np.zeros((4, 4, 3), np.uint8)
)
DETECTOR = Detector.__new__(Detector)
NAMES = {"detector": DETECTOR, "found": FOUND, "Detector": Detector}


def answer(call: Callable[[], object]) -> str:
    with raises("foreign_option") as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("function", "foreign", "ours"),
    [
        (train, {"imgsz": 640}, "image_size=640"),
        (train, {"imgsz": (640, 480)}, "image_size=(640, 480)"),
        (train, {"lr0": 0.01}, 'overrides=["optimizer.lr=0.01"]'),
        (train, {"optimizer": "AdamW"}, 'overrides=["optimizer.name=adamw"]'),
        (train, {"project": "runs"}, 'output_dir="runs"'),
        (train, {"name": "a", "project": "runs"}, 'output_dir="runs/a"'),
        (train, {"model": "yolov5n.pt"}, 'model="yolov5n", weights="yolov5n_coco"'),
        (train, {"num_classes": 3}, ""),
        (DETECTOR.train, {"imgsz": 640}, 'overrides=["model.image_size=640"]'),
        (DETECTOR, {"conf": 0.4}, "threshold=0.4"),
        (DETECTOR.predict, {"conf": 0.4}, "threshold=0.4"),
        (evaluate, {"conf": 0.4}, 'overrides=["nms.score_threshold=0.4"]'),
        (export, {"format": "onnx"}, 'formats=["onnx"]'),
    ],
)
def test_python_answers_arguments_as_the_shell_does(
    function: Callable[..., object], foreign: dict[str, object], ours: str
) -> None:
    if not ours:  # of nobody
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            function("x", **foreign)
        return
    said = answer(lambda: function("x", **foreign))
    assert f"`{ours}`" in said
    name = ours.partition("=")[0]
    called = {DETECTOR: Detector.__call__, export: api.export}.get(function, function)
    assert name in inspect.signature(called).parameters


def test_absent_data_are_answered_as_the_shell_does() -> None:
    with raises("data_not_found", "nope.yaml"):
        train("nope.yaml", model="yolov5n")


def test_all_arguments_are_answered_at_once() -> None:
    said = answer(lambda: train("x", model="yolov5n", imgsz=64, epochs=1, workers=2))
    weights = answer(lambda: train("x", model="yolov5n.pt", imgsz=64))
    assert "`image_size=64`" in weights and 'weights="yolov5n_coco"`' in weights
    assert "`image_size=64`" in said and '`overrides=["data.workers=2"]`' in said


@pytest.mark.parametrize("owner", ["ppdist", "Detector", "Detections"])
def test_python_answers_names_of_other_trainers(owner: str) -> None:
    thing = {"ppdist": ppdist, "Detector": DETECTOR, "Detections": FOUND}[owner]
    for name, text in table().python[owner].items():
        say = (lambda: FOUND[0]) if name == "[0]" else functools.partial(getattr, thing, name)
        assert text in answer(say)
        for span in re.findall(r"`([^`]+)`", text):
            if span.startswith("ppdist "):
                check(Typed(owner, span))
            for start, attribute in re.findall(r"\b(detector|found)\.(\w+)", span):
                assert hasattr(NAMES[start], attribute), span
            for call in re.findall(r"\b([A-Za-z]\w*)\(", span):
                known = {*ppdist.__all__, "print", *dir(FOUND), *dir(Detector), "detector"}
                assert call in known, span


def test_objects_stay_what_they_are() -> None:
    assert not hasattr(FOUND, "boxes") and not hasattr(DETECTOR, "val")
    assert not hasattr(ppdist, "YOLO")
    assert "Detector(" in answer(lambda: exec("from ppdist import YOLO"))
    assert copy.deepcopy(FOUND).names == pickle.loads(pickle.dumps(FOUND)).names == ("a",)
    with pytest.raises(AttributeError, match="nothing"):
        _ = FOUND.nothing
    with raises("weights_not_found"):  # `nms` and `int8` are ours
        export("nowhere", "out", nms=False, int8=True)


# --- installation ---


def test_setup_and_package_want_the_same_pythons() -> None:
    texts = [(ROOT / name).read_text("utf-8") for name in ("setup.py", "ppdist/__init__.py")]
    bounds = [re.search(r"not (\(3, \d+\)) <= .* <= \(3, (\d+)\)", text) for text in texts]
    least, most = next((bound[1], int(bound[2])) for bound in bounds if bound)
    assert [(bound[1], int(bound[2])) for bound in bounds if bound] == [(least, most)] * 2
    assert f'python_requires=">=3.10,<3.{most + 1}"' in texts[0] and least == "(3, 10)"


@pytest.mark.parametrize("version", [(3, 9, 18), (3, 14, 0)])
def test_another_python_ends_in_one_line(
    version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (ROOT / "ppdist/__init__.py").read_text("utf-8")
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SystemExit) as ended:
        exec(compile(source, "ppdist", "exec"), {"__name__": "ppdist_of_another_python"})
    assert str(ended.value.code).startswith("ppdist needs Python 3.10")
    assert "\n" not in str(ended.value.code)
    ast.parse(source, feature_version=(3, 8))  # so far it must be understood


def test_windows_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (ROOT / "ppdist/__init__.py").read_text("utf-8")
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        exec(compile(source, "ppdist", "exec"), {"__name__": "ppdist_on_windows"})
    assert "WSL2" in str(ended.value.code) and "\n" not in str(ended.value.code)


def test_missing_paddle_is_one_message_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "paddle", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for call in (lambda: train("x"), lambda: Detector("x"), lambda: export("x", "y")):
        with raises("paddle_missing", "pip install 'ppdist[cpu]'"):
            call()
