"""Reference files of sizes nobody has listed: understood, compared, and a false number is found."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from ppdist.common.errors import DataError
from tests.reference.formulas import CLASSES
from tests.reference.parity import ModelReport, family_of, verify
from tests.reference.parity.measure import GROUPS, Measurement, off
from tests.reference.stored import with_one
from tests.reference.writer import values_of, write_folder

pytestmark = pytest.mark.slow  # by default: test_parity_originals.py and test_parity_tool.py

SMALL = ("ppyoloe_plus_t", "yolov5n", "yolov5n_cls")  # one of each family
OTHERS = ("ppyoloe_t", "yolov5s", "yolov5n6", "yolov5s_cls")
BIG = ("ppyoloe_m", "ppyoloe_plus_x", "yolov5l", "yolov5x6", "yolov5l6", "yolov5m6", "yolov5m_cls")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("references")
    write_folder(folder, SMALL)
    return folder


def only(folder: Path) -> ModelReport:
    (report,) = verify(folder)
    return report


def array(stored: Path, name: str, key: str) -> np.ndarray:
    with np.load(stored / f"{name}.npz") as archive:
        return archive[key]


def assert_equal(reports: list[ModelReport], names: tuple[str, ...]) -> None:
    assert sorted(report.name for report in reports) == sorted(names)
    for report in reports:
        assert report.passed, "\n".join(report.lines())
        assert report.unread == []
        assert report.lines()[-1].endswith("PASS")


def test_every_family_is_recognised_by_file_names(stored: Path) -> None:
    reports = list(verify(stored))
    assert_equal(reports, SMALL)
    groups = {report.name: {m.group for m in report.measurements} for report in reports}
    everything = set(GROUPS)  # keys: those of the gradients; the folder has no key list
    assert groups["ppyoloe_plus_t"] == groups["yolov5n"] == everything
    assert groups["yolov5n_cls"] == {"keys", "features", "scores", "losses", "gradients"}


@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.slow), True])
def test_other_sizes_pass_with_or_without_losses(tmp_path: Path, training: bool) -> None:
    names = OTHERS if not training else ("yolov5n6",)
    write_folder(tmp_path, names, training)
    reports = list(verify(tmp_path))
    assert_equal(reports, names)
    for report in reports:
        groups = {m.group for m in report.measurements}
        assert ("losses" in groups) == ("gradients" in groups) == training


@pytest.mark.slow
@pytest.mark.parametrize("name", BIG)
def test_big_sizes_need_no_change(tmp_path: Path, name: str) -> None:
    write_folder(tmp_path, (name,))
    assert_equal(list(verify(tmp_path)), (name,))


TAMPERED = {
    "ppyoloe_plus_t": {
        "backbone1_val": ("features", 1.001),
        "neck2_stat": ("features", 1.001),
        "scores": ("scores", 1.001),
        "boxes_stat": ("boxes", 1.001),
        "nms_top50": ("NMS", 1.01),
        "full_tal_loss_iou": ("losses", 1.001),
        "empty1_atss_assign_score": ("assignment", 1.01),
        "full_atss_grad_l2": ("gradients", 1.01),
        "bn_after_forward_variance": ("BN statistics", 1.001),
    },
    "yolov5n": {
        "neck0_val": ("features", 1.001),
        "pred_xywh_obj_cls": ("boxes", 1.001),
        "pred_stat": ("scores", 1.001),
        "nms_conf0.25_count": ("NMS", 2),
        "empty1_lbox_lobj_lcls": ("losses", 1.001),
        "full_bt1_box": ("assignment", 1.001),
        "full_grad_l2": ("gradients", 1.01),
        "bn_after_forward_running_mean": ("BN statistics", 1.001),
    },
    "yolov5n_cls": {
        "backbone0_stat": ("features", 1.001),
        "train_logits": ("scores", 1.01),
        "train_loss": ("losses", 1.001),
        "train_grad_l2": ("gradients", 1.01),
    },
}


@pytest.mark.parametrize("name", SMALL)
def test_tampered_value_names_its_group(stored: Path, tmp_path: Path, name: str) -> None:
    changes = {}
    for key, (_, factor) in TAMPERED[name].items():
        value = array(stored, name, key)
        flat = value.ravel().copy()
        place = -1 if key == "pred_stat" else int(np.abs(flat).argmax())  # -1: of a class score
        flat[place] = flat[place] * factor
        changes[key] = flat.reshape(value.shape)
    report = only(with_one(stored, tmp_path, name, **changes))
    missed = {m.group for m in report.missed}
    assert missed == {group for group, _ in TAMPERED[name].values()}
    assert not report.passed and not report.error
    line, *reasons = report.lines()
    assert line.startswith(name) and line.endswith("FAIL")
    for group in missed:
        assert any(reason.startswith(f"  {group}: ") for reason in reasons)


SIGNED = {  # sizes that are positive, and so must not be divided by with their sign
    "ppyoloe_plus_t": ("neck2_stat", "full_tal_grad_l2", "empty1_atss_loss", "full_atss_score_sum"),
    "yolov5n": ("backbone0_stat", "full_grad_l2", "empty1_loss", "bn_after_forward_running_var"),
    "yolov5n_cls": ("backbone0_stat", "train_grad_l2", "train_loss"),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_flipped_sign_is_found(stored: Path, tmp_path: Path, name: str) -> None:
    changes = {key: -array(stored, name, key) for key in SIGNED[name]}
    report = only(with_one(stored, tmp_path, name, **changes))
    missed = " ".join(m.name for m in report.missed)
    words = ("mean and deviation", "norms, largest", "norms, median", "loss")
    assert not report.error and all(word in missed for word in words)
    assert all(m.error > 0.1 and m.strain > 100 for m in report.missed)


def test_an_error_below_zero_is_none_that_passes() -> None:
    assert not Measurement("losses", "loss", -1e-9, 1e-5).passed
    assert Measurement("losses", "loss", -1e-9, 1e-5).strain == np.inf
    assert off(0.0, 0.0) == 0 and off(1.0, 0.0) == np.inf and off(1.0, -1.0) == 2


@pytest.mark.slow
def test_every_false_array_of_a_file_is_found_by_itself(stored: Path, tmp_path: Path) -> None:
    """None of the arrays may be read and then ignored."""
    name = "yolov5n_cls"
    with np.load(stored / f"{name}.npz") as archive:
        keys = {k for k, v in archive.items() if v.dtype.kind == "f"} | {"probs_top5"}
    for key in sorted(keys):
        value = array(stored, name, key)
        report = only(with_one(stored, tmp_path, name, **{key: np.flip(value) * 2 + 1}))
        assert not report.passed, key


def test_nan_is_never_within_tolerance(stored: Path, tmp_path: Path) -> None:
    value = array(stored, "yolov5n_cls", "logits").copy()
    value[0, 0] = np.nan
    report = only(with_one(stored, tmp_path, "yolov5n_cls", logits=value))
    assert [m.name for m in report.missed] == ["logits"]


MISUNDERSTOOD = [
    ("a missing array", {"logits": None}, "expected the array 'logits', which is not in the file"),
    ("another shape", {"logits": np.zeros((1, 3))}, "train_labels: expected a list of labels 0..2"),
    ("too few values", {"backbone0_val": np.zeros(3)}, "expected values of shape [256], found [3]"),
    ("broken settings", {"layers_json": np.array("{")}, "layers_json: expected JSON, found '{'"),
    ("an index outside", {"backbone0_idx": np.full(256, 10**8)}, "IndexError at measure.py:"),
    ("no loss", {"train_loss": None}, "expected the array 'train_loss', which is not in the file"),
    ("no labels", {"train_labels": np.zeros(0, int)}, "expected a list of labels 0..4"),
    ("no samples", {"backbone0_idx": np.zeros(0, int), "backbone0_val": np.zeros(0)},
     "backbone0_idx: expected indices, found none"),
    ("settings of another kind", {"layers_json": np.array('{"backbone": 3}')},
     "settings: backbone: expected a list, found '3'"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"), [x[1:] for x in MISUNDERSTOOD], ids=[x[0] for x in MISUNDERSTOOD]
)
def test_file_of_other_form_is_error_with_place(
    stored: Path, tmp_path: Path, changes: dict, message: str
) -> None:
    report = only(with_one(stored, tmp_path, "yolov5n_cls", **changes))
    assert not report.passed
    assert report.error.startswith(f"{tmp_path / 'yolov5n_cls.npz'}: ") and message in report.error
    assert report.lines()[0].endswith("ERROR")


EMPTIED: list[tuple[str, tuple[str, ...], str]] = [
    ("ppyoloe_plus_t", ("nms_top50",), "NMS: rows in the file"),
    ("ppyoloe_plus_t", ("anchor_idx", "scores", "boxes_xyxy"), "anchor_idx: expected indices"),
    ("ppyoloe_plus_t", tuple(f"full_tal_assign_{x}" for x in ("idx", "label", "box", "score")),
     "full_tal_assign_idx: expected indices"),
    ("yolov5n", ("nms_conf0.25_iou0.45_top50",), "score 0.25, IoU 0.45: rows in the file"),
    ("yolov5n", ("anchor_idx",), "anchor_idx: expected indices"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys", "message"), EMPTIED)
def test_nothing_passes_for_being_empty(
    stored: Path, tmp_path: Path, name: str, keys: tuple[str, ...], message: str
) -> None:
    changes = {key: array(stored, name, key)[:0] for key in keys}
    report = only(with_one(stored, tmp_path, name, **changes))
    assert not report.passed and message in "\n".join(report.lines())


def test_a_file_with_all_but_its_positives_does_not_pass(stored: Path, tmp_path: Path) -> None:
    name = "ppyoloe_plus_t"
    parts = [f"full_tal_assign_{part}" for part in ("idx", "label", "box", "score")]
    background = array(stored, name, parts[1]) == CLASSES
    changes = {key: array(stored, name, key)[background] for key in parts}
    report = only(with_one(stored, tmp_path, name, **changes))
    assert [m.name for m in report.missed] == ["full tal positives in the file"]


REMOVED = [
    ("yolov5n", r"full_lbox_lobj_lcls", "expected the array 'full_lbox_lobj_lcls'"),
    ("yolov5n", r".*_lbox_lobj_lcls|.*_loss", "expected the array 'full_"),
    ("yolov5n", r"nms_.*", "expected an array nms_confSCORE_iouIOU_topN"),
    ("yolov5n", r"nms_.*_top50", "expected an array nms_confSCORE_iouIOU_topN"),
    ("ppyoloe_plus_t", r".*_loss", "expected the array 'full_atss_loss'"),
    ("ppyoloe_plus_t", r"nms_.*", "expected the array 'nms_"),
    ("yolov5n_cls", r"probs_top5", "expected the array 'probs_top5'"),
]


@pytest.mark.parametrize(("name", "pattern", "message"), REMOVED)
def test_nothing_passes_for_being_left_out(
    stored: Path, tmp_path: Path, name: str, pattern: str, message: str
) -> None:
    with np.load(stored / f"{name}.npz") as archive:
        gone = {key: None for key in archive.files if re.fullmatch(pattern, key)}
    report = only(with_one(stored, tmp_path, name, **gone))
    assert gone and not report.passed and message in report.error


@pytest.mark.slow
def test_t_with_an_auxiliary_head_is_recognised(tmp_path: Path) -> None:
    name = "ppyoloe_plus_t"
    write_folder(tmp_path, ())
    np.savez(tmp_path / f"{name}.npz", **values_of(name, False, keys=("aux_head.x",)))
    assert_equal(list(verify(tmp_path)), (name,))
    for keys in ((), ("aux_head.gfl_cls.weight",)):
        assert (family_of(name).build(name, 80, keys).aux_head is not None) == bool(keys)


def test_unsupported_settings_are_refused_by_name(stored: Path, tmp_path: Path) -> None:
    config = json.loads(str(array(stored, "ppyoloe_plus_t", "config_json")))
    config["head"]["fpn_strides"] = [64, 32, 16, 8]
    changes = {"config_json": np.array(json.dumps(config))}
    report = only(with_one(stored, tmp_path, "ppyoloe_plus_t", **changes))
    assert "head.fpn_strides is [64, 32, 16, 8]; this comparison knows [32, 16, 8] only" in (
        report.error
    )
    for change, message in {
        "reg_max": (8, "head.reg_max is 8; this comparison knows 16 only"),
        "shape": (1, "head.shape is 1; this comparison does not know that setting"),
        "loss_weight": ({"class": "x"}, "head.loss_weight.class: expected a number, found 'x'"),
    }.items():
        weights = {"class": 1, "iou": 1, "dfl": 1}
        config["head"] = {"fpn_strides": [32, 16, 8], "loss_weight": weights}
        config["head"][change] = message[0]
        changes = {"config_json": np.array(json.dumps(config))}
        report = only(with_one(stored, tmp_path, "ppyoloe_plus_t", **changes))
        assert message[1] in report.error
    config["head"] = [1]
    changes = {"config_json": np.array(json.dumps(config))}
    report = only(with_one(stored, tmp_path, "ppyoloe_plus_t", **changes))
    assert "settings: head: expected an object, found '[1]'" in report.error
    hyp = json.loads(str(array(stored, "yolov5n", "hyp_json")))
    (tmp_path / "ppyoloe_plus_t.npz").unlink()
    changes = {"hyp_json": np.array(json.dumps({**hyp, "fl_gamma": 1.5}))}
    report = only(with_one(stored, tmp_path, "yolov5n", **changes))
    assert "hyp_json: fl_gamma is 1.5; this comparison knows 0.0 only" in report.error
    assert report.measurements  # what came before is still shown


def test_unread_array_makes_report_incomplete(stored: Path, tmp_path: Path) -> None:
    report = only(with_one(stored, tmp_path, "yolov5n_cls", note=np.zeros(1)))
    assert not report.passed and report.lines()[-1] == "  not compared: note"
    assert report.lines()[0].endswith("INCOMPLETE")


def test_names_parse_by_form_and_others_are_refused() -> None:
    families = {name: family_of(name).__name__.rpartition(".")[2] for name in (*OTHERS, *BIG)}
    assert families == {
        name: "ppyoloe" if "pp" in name else "yolov5_cls" if "cls" in name else "yolov5"
        for name in (*OTHERS, *BIG)
    }
    for name in ("yolov5", "yolov5n7", "yolov5n6_cls", "ppyoloe_plus", "ppyoloe_s_2", "yolov8n"):
        with pytest.raises(
            DataError, match="is no model known here; expected ppyoloe_SIZE or"
        ) as error:
            family_of(name)
        assert error.value.code == "unknown_model"


def test_folder_without_formulas_or_values_is_named(stored: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"expected a folder of parity .* parity_weights\.py in it"
    ) as error:
        list(verify(tmp_path))
    assert error.value.code == "no_references"
    (tmp_path / "parity_weights.py").write_text("EVAL_CASE = 1\n")
    with pytest.raises(
        DataError, match="expected it to define parity_value, parity_image"
    ) as error:
        list(verify(tmp_path))
    assert error.value.code == "formulas_invalid"
    (tmp_path / "parity_weights.py").write_bytes((stored / "parity_weights.py").read_bytes())
    with pytest.raises(DataError, match="no reference") as error:
        list(verify(tmp_path))
    assert error.value.code == "no_references"
