"""tools/verify.py: its verdict, its exit code, and that one bad file does not hide the others."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.reference.formulas import CLASSES
from tests.reference.parity import family_of
from tests.reference.parity.reference import official_shape, official_state
from tests.reference.stored import with_one
from tests.reference.writer import values_of, write_folder

TOOL = Path(__file__).parents[2] / "tools" / "verify.py"


class Done(NamedTuple):
    code: int | str | None
    out: str
    err: str


@pytest.fixture
def run_tool(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """tools/verify.py parity, in this process: Paddle takes seconds to import."""

    def run(folder: Path, *options: str) -> Done:
        arguments = ["verify.py", "parity", "--reference", str(folder), *options]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(TOOL), run_name="__main__")
        return Done(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("references")
    write_folder(folder, ("yolov5n_cls",))
    return folder


@pytest.mark.slow
def test_parity_tool_passes_and_writes_measurements(stored: Path, tmp_path: Path) -> None:
    folder = with_one(stored, tmp_path, "yolov5n_cls")
    model = family_of("yolov5n_cls").build("yolov5n_cls", CLASSES)
    shapes = {key: official_shape(value) for key, value in official_state(model).items()}
    lists = {"yolov5n_cls": {**shapes, "model.0.bn.num_batches_tracked": []}}
    (folder / "yolov5_keys.json").write_text(json.dumps(lists))
    file = tmp_path / "all.json"
    command = [sys.executable, str(TOOL), "parity", "--reference", str(folder), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    header, line, verdict = done.stdout.splitlines()
    assert header.split()[:3] == ["model", "keys", "features"] and line.endswith("PASS")
    assert verdict == (
        "PASS: 1 models, 19 of 19 measurements within tolerance, 0 files not understood"
    )
    rows = json.loads(file.read_text())
    assert len(rows) == 19 and rows[0] == ["yolov5n_cls", "keys", "keys and shapes", 0, 0]


def test_parity_tool_names_unreadable_compares_rest(
    stored: Path, tmp_path: Path, run_tool: Callable[..., Done]
) -> None:
    folder = with_one(stored, tmp_path, "yolov5n_cls")
    (folder / "rtdetr_r18.npz").write_bytes(b"no archive")
    (folder / "empty.npz").write_bytes(b"")
    with (folder / "single.npz").open("wb") as file:
        np.save(file, np.ones(3))
    (folder / "broken_keys.json").write_text("{")
    (folder / "yolov5_keys.json").write_text('{"yolov5n": {"model.0.conv.weight": 5}}')
    np.savez(folder / "yolov8n.npz", **values_of("yolov5n_cls", training=False))
    done = run_tool(folder)
    assert done.code == 2
    assert "rtdetr_r18.npz: expected an .npz of plain arrays" in done.err
    assert "empty.npz: expected an .npz of plain arrays: No data left" in done.err
    assert "single.npz: a single array of np.save; expected an .npz" in done.err
    assert "yolov5_keys.json: expected JSON of model -> key -> shape" in done.err
    assert "broken_keys.json: expected JSON: " in done.err
    assert "yolov8n.npz: 'yolov8n' is no model known here" in done.err
    assert "FAIL: 7 models, 18 of 18 measurements within tolerance, 6 files not" in done.out


def test_the_tool_fails_where_a_number_is_off(
    stored: Path, tmp_path: Path, run_tool: Callable[..., Done]
) -> None:
    done = run_tool(with_one(stored, tmp_path, "yolov5n_cls", train_loss=np.array(9.0)))
    assert done.code == 1
    assert "  losses: loss: off by" in done.out and "allowed 1e-05" in done.out
    assert "FAIL: 1 models, 17 of 18 measurements within tolerance" in done.out


def test_a_stored_zero_is_a_number_that_is_off(
    stored: Path, tmp_path: Path, run_tool: Callable[..., Done]
) -> None:
    done = run_tool(with_one(stored, tmp_path, "yolov5n_cls", train_loss=np.array(0.0)))
    assert done.code == 1 and "  losses: loss: off by inf, allowed 1e-05" in done.out


def test_the_tool_tries_the_json_file_before_it_compares(
    stored: Path, run_tool: Callable[..., Done]
) -> None:
    file = next(stored.glob("*.npz"))
    done = run_tool(stored, "--json", str(file / "all.json"))
    assert done.code == 2 and not done.out
    assert f"{file}: cannot be written to: it is a file; expected a folder" in done.err


def test_the_tool_names_a_folder_that_is_not_there(
    tmp_path: Path, run_tool: Callable[..., Done]
) -> None:
    done = run_tool(tmp_path / "none")
    assert done.code == 2
    assert done.err.strip().splitlines()[-1] == (
        f"ppdist: error: {tmp_path / 'none'}: expected a folder of parity references with "
        "parity_weights.py in it"
    )


def test_file_with_uncompared_values_is_incomplete(
    stored: Path, tmp_path: Path, run_tool: Callable[..., Done]
) -> None:
    done = run_tool(with_one(stored, tmp_path, "yolov5n_cls", note=np.zeros(1)))
    assert done.code == 1 and "\nINCOMPLETE: 1 models, 18 of 18 measurements" in done.out
