"""Our numbers are the original implementation's, for weights made by a formula."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ppdist.errors import DataError
from ppdist.parity import (
    Measurement,
    build,
    compare,
    compare_inference,
    compare_keys,
    read_references,
)


def assert_passed(measurements: list[Measurement]) -> None:
    wrong = [f"{m.name}: {m.error:.3g} > {m.tolerance:.3g}" for m in measurements if not m.passed]
    assert measurements and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["ppyoloe_s", "ppyoloe_plus_s"])
def test_features_boxes_losses_assignments_and_gradients_are_the_original_s(
    shared_dir: Path, name: str
) -> None:
    references = {r.name: r for r in read_references(shared_dir / "parity")}
    measurements = list(compare(references[name]))
    assert len(measurements) == 66  # both variants in both phases
    assert_passed(measurements)


def test_the_large_model_infers_what_the_original_infers(shared_dir: Path) -> None:
    references = {r.name: r for r in read_references(shared_dir / "parity")}
    assert_passed(list(compare(references["ppyoloe_l"])))


def test_keys_and_shapes_of_small_and_medium_are_the_official_ones(shared_dir: Path) -> None:
    measurements = list(compare_keys(shared_dir / "parity", "sm"))
    assert len(measurements) == 4
    assert_passed(measurements)


@pytest.mark.slow
def test_keys_and_shapes_of_large_and_extra_large_are_the_official_ones(shared_dir: Path) -> None:
    measurements = list(compare_keys(shared_dir / "parity", "lx"))
    assert len(measurements) == 4
    assert_passed(measurements)


def test_a_wrong_weight_is_noticed(shared_dir: Path) -> None:
    references = {r.name: r for r in read_references(shared_dir / "parity")}
    model = build(references["ppyoloe_s"])
    weight = model.backbone.stages[0].attn.fc.bias
    weight.set_value(weight + 0.01)
    failed = [m.name for m in compare_inference(model, references["ppyoloe_s"]) if not m.passed]
    assert "backbone0 / largest" in failed and "scores" in failed


def test_a_folder_without_references_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"parity_weights\.py"):
        read_references(tmp_path)


def verify(folder: Path) -> subprocess.CompletedProcess[str]:
    tool = Path(__file__).parents[2] / "tools" / "verify.py"
    command = [sys.executable, str(tool), "parity", "--reference", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_tool_compares_a_folder_and_fails_when_a_number_is_off(
    shared_dir: Path, tmp_path: Path
) -> None:
    shutil.copy(shared_dir / "parity" / "parity_weights.py", tmp_path)
    with np.load(shared_dir / "parity" / "ppyoloe_s.npz") as archive:
        values = {k: archive[k] for k in archive.files if not k.startswith(("full_", "empty1_"))}
    np.savez(tmp_path / "ppyoloe_s.npz", **values)
    done = verify(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "ppyoloe_s: 10 of 10 within tolerance" in done.stdout
    np.savez(tmp_path / "ppyoloe_s.npz", **{**values, "scores": values["scores"] + 1e-3})
    done = verify(tmp_path)
    assert done.returncode == 1
    assert "scores: off by 0.001, allowed 2e-05" in done.stdout


def test_the_tool_names_a_folder_that_is_not_there(tmp_path: Path) -> None:
    done = verify(tmp_path / "none")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1] == (
        f"ppdist: error: {tmp_path / 'none'}: expected a folder of parity references with "
        "parity_weights.py in it"
    )
