"""tools/convert.py: from every kind of weights to every other, and its messages."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.experiment import load_config
from ppdist.engine.checkpoint import save_checkpoint
from ppdist.models.build import build_model
from ppdist.models.model_card import read_card
from ppdist.models.weights import (
    arrays_of,
    load_weights,
    official_arrays_of,
    read_arrays,
    write_arrays,
)
from tests.forked import run_here

CONFIG = """
data: {root: nowhere, train: {annotations: a.json}, val: {annotations: a.json}}
model: {name: yolov5, size: n, width_multiple: 0.0625, num_classes: 3}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "cfg.yml").write_text(CONFIG)
    return tmp_path / "cfg.yml"


@pytest.fixture
def convert(config: Path):
    """Runs the tool; exit code, and what it printed."""

    def run(source: Path, out: Path, *more: str) -> tuple[int, str]:
        done = run_here("convert", "-c", config, "-w", source, "--out", out, *more)
        return done.returncode, done.stdout + done.stderr

    return run


def test_round_trip_through_formats_is_bit_exact(config, convert, tmp_path) -> None:
    model = build_model(load_config(config).model)
    names = ["w.safetensors", "w.pt", "w.PTH", "w.npz", "official.pdparams", "back.safetensors"]
    files = [tmp_path / "new" / name for name in names]
    write_arrays(files[0], arrays_of(model))
    for source, out in pairwise(files):
        keys = ["--keys", "official"] if out.stem == "official" else []
        code, said = convert(source, out, *keys)
        assert code == 0, said
        kind = "official" if out.suffix in (".pt", ".PTH") or keys else "ours"
        assert f"{out}: " in said and f"{kind} keys; " in said
    first, last = read_arrays(files[0]), read_arrays(files[-1])  # the last has a model card, too
    assert {k: v.tobytes() for k, v in first.items()} == {k: v.tobytes() for k, v in last.items()}
    assert read_card(files[-1]).model["num_classes"] == 3
    assert read_arrays(files[1]).keys() == official_arrays_of(model).keys()
    other = build_model(load_config(config).model)
    load_weights(other, files[4])
    ours, theirs = arrays_of(other), arrays_of(model)
    assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)


def test_wrong_input_is_one_message_and_exit_2(config, convert, tmp_path) -> None:
    model = build_model(load_config(config).model)
    write_arrays(tmp_path / "w.npz", arrays_of(model))
    code, said = convert(tmp_path / "w.npz", tmp_path / "w.onnx")
    assert code == 2 and "[weights_format]" in said
    code, said = convert(tmp_path / "absent.pt", tmp_path / "w.onnx")
    assert code == 2 and "[weights_format]" in said  # before anything is read
    code, said = convert(tmp_path / "absent.pt", tmp_path / "w.pt")
    assert code == 2 and "[weights_not_found]" in said
    code, said = convert(tmp_path / "w.npz", tmp_path / "w.pt", "-o", "model.num_classes=4")
    assert code == 2 and "[weights_of_other_config]" in said
    assert not (tmp_path / "w.pt").exists()


def test_checkpoint_becomes_pdparams_of_ema_weights(config, convert, tmp_path) -> None:
    arrays = arrays_of(build_model(load_config(config).model))
    averaged = {key: value + 1 for key, value in arrays.items()}
    save_checkpoint(tmp_path, 7, {"model": arrays, "ema": averaged}, {"step": 7}, "")
    code, said = convert(tmp_path / "last", tmp_path / "best.pdparams")
    assert code == 0, said
    written = read_arrays(tmp_path / "best.pdparams")
    assert written.keys() == averaged.keys()
    for key, value in averaged.items():
        np.testing.assert_array_equal(written[key], value)
