"""Parity: its verdict, its exit code, and what it says of files that are odd."""

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.errors import raises
from tests.reference.formulas import CLASSES
from tests.reference.parity import family_of, verify
from tests.reference.parity.measure import Measurement, off
from tests.reference.parity.reference import official_shape, official_state
from tests.reference.writer import NAME, with_one, write_folder


class Done(NamedTuple):
    code: int | str | None
    out: str
    err: str


@pytest.fixture
def run_tool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """python -m tests.reference parity, in this process: Paddle takes seconds to import."""

    def run(folder: Path, *options: str) -> Done:
        arguments = ["reference", "parity", "--reference", str(folder), *options]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("tests.reference", run_name="__main__")
        return Done(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("references")
    write_folder(folder)
    return folder


def test_equal_values_pass_and_are_written(stored, tmp_path, run_tool) -> None:
    folder = with_one(stored, tmp_path)
    model = family_of(NAME).build(NAME, CLASSES)
    shapes = {key: official_shape(value) for key, value in official_state(model).items()}
    lists = {NAME: {**shapes, "model.0.bn.num_batches_tracked": []}}
    (folder / "yolov5_keys.json").write_text(json.dumps(lists))
    done = run_tool(folder, "--json", str(tmp_path / "all.json"))
    assert done.code == 0, done.err
    header, line, verdict = done.out.splitlines()
    assert header.split()[:3] == ["model", "keys", "features"] and line.endswith("PASS")
    assert verdict.startswith("PASS: 1 models, 19 of 19 measurements")
    rows = json.loads((tmp_path / "all.json").read_text())
    assert len(rows) == 19 and rows[0] == [NAME, "keys", "keys and shapes", 0, 0]


def test_unreadable_files_are_named_and_the_rest_is_compared(stored, tmp_path, run_tool) -> None:
    folder = with_one(stored, tmp_path)
    (folder / "rtdetr_r18.npz").write_bytes(b"no archive")
    (folder / "empty.npz").write_bytes(b"")
    with (folder / "single.npz").open("wb") as file:
        np.save(file, np.ones(3))
    (folder / "broken_keys.json").write_text("{")
    (folder / "yolov5_keys.json").write_text('{"yolov5n": {"model.0.conv.weight": 5}}')
    shutil.copy(folder / f"{NAME}.npz", folder / "yolov8n.npz")
    done = run_tool(folder)
    assert done.code == 2
    for name in ("rtdetr_r18.npz", "empty.npz", "single.npz", "yolov5_keys.json",
                 "broken_keys.json", "yolov8n.npz"):  # fmt: skip
        assert f"{name}: " in done.err
    assert "FAIL: 7 models, 18 of 18 measurements within tolerance, 6 files not" in done.out


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"backbone0_stat": lambda x: x * 1.001}, 1, "features: "),
        ({"logits": lambda x: np.where(x == x.max(), np.nan, x)}, 1, "scores: logits"),
        ({"train_logits": lambda x: x * 1.01}, 1, "scores: "),
        ({"train_grad_l2": lambda x: -x}, 1, "  gradients: "),
        ({"train_loss": lambda x: x + 9}, 1, "losses: loss: off by"),
        ({"train_loss": lambda x: x * 0}, 1, "losses: loss: off by inf"),
        ({"train_loss": lambda x: None}, 2, "'train_loss'"),
        ({"probs_top5": lambda x: None}, 2, "'probs_top5'"),
        ({"logits": lambda x: np.zeros((1, 3))}, 1, "a list of labels 0..2"),
        ({"backbone0_val": lambda x: x[:3]}, 2, "found [3]"),
        ({"backbone0_idx": lambda x: x * 0 + 10**8}, 2, "IndexError at measure.py:"),
        ({"backbone0_idx": lambda x: x[:0], "backbone0_val": lambda x: x[:0]}, 2, "found none"),
        ({"layers_json": lambda x: np.array("{")}, 2, "found '{'"),
        ({"layers_json": lambda x: np.array('{"backbone": 3}')}, 2, "found '3'"),
        ({"note": lambda x: np.zeros(1)}, 1, "INCOMPLETE"),
    ],
)  # fmt: skip
def test_what_is_off_missing_or_odd_never_passes(
    stored, tmp_path, run_tool, changes, code, said
) -> None:
    with np.load(stored / f"{NAME}.npz") as archive:
        arrays = {key: change(archive.get(key)) for key, change in changes.items()}
    done = run_tool(with_one(stored, tmp_path, **arrays))
    assert done.code == code and said in done.out + done.err


def test_an_error_below_zero_is_none_that_passes() -> None:
    assert not Measurement("losses", "loss", -1e-9, 1e-5).passed
    assert Measurement("losses", "loss", -1e-9, 1e-5).strain == np.inf
    assert off(0.0, 0.0) == 0 and off(1.0, 0.0) == np.inf and off(1.0, -1.0) == 2


def test_names_are_parsed_by_form() -> None:
    families = {
        "ppyoloe": ("ppyoloe_t", "ppyoloe_m", "ppyoloe_plus_x"),
        "yolov5": ("yolov5s", "yolov5n6", "yolov5x6"),
        "yolov5_cls": ("yolov5s_cls", "yolov5m_cls"),
    }
    for family, names in families.items():
        assert {family_of(name).__name__.rpartition(".")[2] for name in names} == {family}
    for name in ("yolov5", "yolov5n7", "yolov5n6_cls", "ppyoloe_plus", "ppyoloe_s_2", "yolov8n"):
        with raises("unknown_model"):
            family_of(name)


def test_folder_without_formulas_or_values_is_named(stored, tmp_path, run_tool) -> None:
    for formulas, code in (
        (None, "no_references"),
        (b"EVAL_CASE = 1\n", "formulas_invalid"),
        ((stored / "parity_weights.py").read_bytes(), "no_references"),
    ):
        if formulas is not None:
            (tmp_path / "parity_weights.py").write_bytes(formulas)
        with raises(code):
            list(verify(tmp_path))
    assert run_tool(tmp_path / "none").code == 2


def test_json_file_is_tried_before_the_comparison(stored, run_tool) -> None:
    file = next(stored.glob("*.npz"))
    done = run_tool(stored, "--json", str(file / "all.json"))
    assert done.code == 2 and not done.out and f"{file}: " in done.err


@pytest.mark.slow  # the fast part of it: test_parity_originals.py
def test_every_reference_of_the_original_is_met(shared_dir, tmp_path, run_tool) -> None:
    file = tmp_path / "parity.json"
    done = run_tool(shared_dir / "parity", "--json", str(file))
    assert done.code == 0 and "PASS: 16 models" in done.out
    rows = json.loads(file.read_text())
    assert all(error <= tolerance for *_, error, tolerance in rows)
    compared = {name for name, group, *_ in rows if group == "losses"}
    assert compared == {"ppyoloe_s", "ppyoloe_plus_s", "yolov5n", "yolov5s_cls"}
