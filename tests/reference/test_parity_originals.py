"""Our numbers are the original implementations', for weights made by a formula."""

from pathlib import Path

import numpy as np
import pytest

from ppdist.config.loss import YOLOv5LossConfig
from ppdist.losses.yolov5 import YOLOv5Loss
from tests.errors import raises
from tests.reference.parity import compare, compare_keys, family_of, ppyoloe, verify, yolov5
from tests.reference.parity.measure import GROUPS, Measurement, off
from tests.reference.parity.reference import Reference, read_formulas, read_key_list, read_reference

EVERYTHING = set(GROUPS)
INFERENCE = {"keys", "features", "scores", "boxes", "NMS"}
CLASSIFIER = {"keys", "features", "scores", "losses", "gradients"}


def read(shared_dir: Path, name: str) -> Reference:
    folder = shared_dir / "parity"
    return read_reference(folder / f"{name}.npz", read_formulas(folder))


def key_lists(shared_dir: Path) -> dict[str, dict[str, list[int]]]:
    first, second = sorted((shared_dir / "parity").glob("*_keys.json"))
    return {**read_key_list(first), **read_key_list(second)}


def assert_passed(measurements: list[Measurement]) -> None:
    wrong = [f"{m.name}: {m.error:.3g} > {m.tolerance:.3g}" for m in measurements if not m.passed]
    assert measurements and not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "groups", "count"),
    [
        pytest.param("ppyoloe_s", EVERYTHING, 93, marks=pytest.mark.slow),
        pytest.param("ppyoloe_plus_s", EVERYTHING, 93, marks=pytest.mark.slow),
        pytest.param("ppyoloe_l", INFERENCE, 29, marks=pytest.mark.slow),
        pytest.param("yolov5n", EVERYTHING, 76, marks=pytest.mark.slow),
        pytest.param("yolov5n6", INFERENCE, 44, marks=pytest.mark.slow),
        pytest.param("yolov5m", INFERENCE, 38, marks=pytest.mark.slow),
        ("yolov5s_cls", CLASSIFIER, 19),
    ],
)
def test_every_number_of_a_reference_is_met(
    shared_dir: Path, name: str, groups: set[str], count: int
) -> None:
    reference = read(shared_dir, name)
    shapes = key_lists(shared_dir)[name]
    measurements = list(compare(reference, shapes))
    assert_passed(measurements)
    assert {m.group for m in measurements} == groups
    assert len(measurements) == count
    assert reference.values.unread() == []  # nothing of the file was left out


@pytest.mark.parametrize("variant", yolov5.VARIANTS)
def test_a_training_step_of_yolov5_is_the_originals(shared_dir: Path, variant: str) -> None:
    reference = read(shared_dir, "yolov5n")
    assert_passed(list(yolov5.compare_training(yolov5.rebuild(reference), reference, variant)))


@pytest.mark.slow
def test_every_reference_beside_the_checkout_is_met(shared_dir: Path) -> None:
    reports = list(verify(shared_dir / "parity"))
    assert [report.name for report in reports if not report.passed] == [] and len(reports) == 16
    losses = {r.name for r in reports if any(m.group == "losses" for m in r.measurements)}
    assert losses == {"ppyoloe_s", "ppyoloe_plus_s", "yolov5n", "yolov5s_cls"}


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


@pytest.mark.slow
def test_a_wrong_weight_is_noticed_in_every_output(shared_dir: Path) -> None:
    for family, name, bias in (
        (ppyoloe, "ppyoloe_s", "backbone.stages.0.attn.fc.bias"),
        (yolov5, "yolov5n", "backbone.down2.bn.bias"),
    ):
        reference = read(shared_dir, name)
        model = family.rebuild(reference)
        weight = model.state_dict()[bias]
        weight.set_value(weight + 0.01)
        failed = [m for m in family.compare_inference(model, reference) if not m.passed]
        assert {m.group for m in failed} >= {"features", "scores", "boxes", "NMS"}


def test_gains_are_scaled_as_the_original_scales_them(shared_dir: Path) -> None:
    settings = read(shared_dir, "yolov5n").values.json("hyp_json")
    model = yolov5.build("yolov5n")
    model.image_size = (256, 320)  # of the references' training images
    gains = YOLOv5Loss.build(YOLOv5LossConfig(), model, 1).gains
    assert tuple(gains) == pytest.approx([settings[key] for key in ("box", "obj", "cls")])


def test_a_key_that_differs_is_named_with_both_shapes(shared_dir: Path) -> None:
    shapes = dict(key_lists(shared_dir)["yolov5n"])
    shapes["model.0.conv.weight"] = [16, 3, 5, 5]
    shapes["model.99.bias"] = shapes.pop("model.24.m.0.bias")
    found = compare_keys(yolov5.build("yolov5n"), shapes)
    assert found.error == 3 and not found.passed
    for fact in ("model.0.conv.weight", "[16, 3, 6, 6]", "[16, 3, 5, 5]", "model.99.bias", "[255]"):
        assert fact in found.detail
