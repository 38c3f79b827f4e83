"""Exported models: what they compute, what is refused, what stays untouched."""

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import paddle
import pytest
import yaml

from ppdist.common.errors import ExportError
from ppdist.config.evaluate import NMSConfig
from ppdist.config.runtime import RuntimeOptions
from ppdist.cpu.switch import use_onednn
from ppdist.distributed.sync_batch_norm import SyncBatchNorm2D
from ppdist.export.export import (
    ModelWithNMS,
    _move_into_place,
    deployment_copy,
    draft_folder,
    export_model,
    save_graph,
)
from ppdist.export.predictor import EagerPredictor, ExportedPredictor, detect, split_rows
from ppdist.export.spec import InferenceSpec, read_spec, write_spec
from ppdist.export.verify import (
    load_graphs,
    raw_differences,
    suppressed_differences,
    unexplained_rows,
)
from ppdist.losses.nms import multiclass_nms
from ppdist.models.ppyoloe import PPYOLOE
from tests.errors import raises
from tests.unit.export.tiny import (
    FORMATS,
    NMS,
    SIZE,
    assert_same_boxes,
    exported_detector,
    pictures,
    tiny_model,
    tiny_spec,
)


@pytest.fixture(scope="module")
def model() -> PPYOLOE:
    return tiny_model()


@pytest.fixture(scope="module")
def with_nms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_detector(tmp_path_factory)


@pytest.fixture(scope="module")
def without_nms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported_detector(tmp_path_factory, nms_in_graph=False)


@pytest.mark.parametrize(
    "onednn",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["with oneDNN", "without oneDNN"],
)
@pytest.mark.parametrize("kind", ["with_nms", pytest.param("without_nms", marks=pytest.mark.slow)])
def test_the_exported_model_keeps_the_boxes_of_eager(
    model: PPYOLOE, kind: str, onednn: bool, request: pytest.FixtureRequest
) -> None:
    exported = ExportedPredictor(request.getfixturevalue(kind), RuntimeOptions(onednn=onednn))
    eager = EagerPredictor(deployment_copy(model), NMS)
    for images in (pictures(1), pictures(3), pictures(2, 96, 64)):
        assert_same_boxes(exported(images), eager(images))


@pytest.mark.slow
def test_images_without_objects_give_no_rows(tmp_path: Path, model: PPYOLOE) -> None:
    nothing = NMS.model_copy(update={"score_threshold": 1.0})
    save_graph(ModelWithNMS(deployment_copy(model), nothing), tmp_path, tiny_spec().input)
    for graph in load_graphs(tmp_path).values():
        rows_R6, count_B = graph(pictures(2))
        assert [found_R6.shape for found_R6 in split_rows(rows_R6, count_B)] == [(0, 6), (0, 6)]


def test_infer_yml_suffices_for_eager_boxes(model: PPYOLOE, with_nms: Path) -> None:
    """Written without anything of ppdist, as somebody who deploys the model would."""
    image_HW3 = pictures(1, 40, 200)[0].transpose(1, 2, 0).astype(np.uint8)
    spec = yaml.safe_load((with_nms / "infer.yml").read_text(encoding="utf-8"))
    assert (spec["input"]["colour"], spec["input"]["layout"]) == ("rgb", "BCHW")
    assert (spec["resize"]["mode"], spec["resize"]["interpolation"]) == ("stretch", "cubic")
    height, width = spec["input"]["size"]
    resized = cv2.resize(image_HW3, (width, height), interpolation=cv2.INTER_CUBIC)
    config = paddle.inference.Config(*(str(with_nms / file) for file in spec["paddle"]["files"]))
    config.disable_glog_info()
    predictor = paddle.inference.create_predictor(config)
    predictor.get_input_handle(spec["input"]["name"]).copy_from_cpu(
        resized.transpose(2, 0, 1)[None].astype(spec["input"]["dtype"])
    )
    predictor.run()
    rows_R6 = predictor.get_output_handle(spec["paddle"]["outputs"][0]["name"]).copy_to_cpu()
    rows_R6[:, [2, 4]] = (rows_R6[:, [2, 4]] * 200 / width).clip(0, 200)
    rows_R6[:, [3, 5]] = (rows_R6[:, [3, 5]] * 40 / height).clip(0, 40)

    eager = EagerPredictor(deployment_copy(model), NMS)
    assert_same_boxes([rows_R6], [detect(eager, image_HW3, SIZE)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["leaky_relu", "hardswish", "relu"])
def test_every_activation_is_exported_as_in_eager(name: str, tmp_path: Path) -> None:
    """Suppression is left out of the graph, as no activation matters to it."""
    model = tiny_model(activation=name)
    report = export_model(model, tmp_path / "model", tiny_spec(), FORMATS, nms_in_graph=False)
    assert set(report.agreement) == set(FORMATS)
    assert_untouched(model, tiny_model(activation=name))
    images = pictures(4, 96, 64)
    exported = ExportedPredictor(tmp_path / "model", RuntimeOptions(backend=FORMATS[-1]))(images)
    eager = EagerPredictor(deployment_copy(model), NMS)(images)
    published = EagerPredictor(deployment_copy(tiny_model()), NMS)(images)
    assert sum(map(len, eager)) > 0
    assert [unexplained_rows(a, b, NMS) for a, b in zip(exported, eager)] == [0] * 4
    assert any(len(a) != len(b) or not np.allclose(a, b) for a, b in zip(eager, published))


def assert_untouched(model: PPYOLOE, fresh: PPYOLOE) -> None:
    """Exporting leaves weights, layers and mode as they were."""
    after = model.state_dict()
    assert list(after) == list(fresh.state_dict())
    for key, value in fresh.state_dict().items():
        assert np.array_equal(after[key].numpy(), value.numpy()), key
    expected = [(type(layer), layer.training) for layer in fresh.sublayers()]
    assert [(type(layer), layer.training) for layer in model.sublayers()] == expected


def test_deploy_copy_has_plain_convs_and_eval_norms() -> None:
    model = tiny_model()
    plain = [type(layer) for layer in model.sublayers()]
    use_onednn(model)
    for layer in model.sublayers():
        if type(layer) is paddle.nn.BatchNorm2D:
            layer.__class__ = SyncBatchNorm2D
    training = [type(layer) for layer in model.sublayers()]
    assert training != plain
    copied = deployment_copy(model)
    assert [type(layer) for layer in copied.sublayers()] == plain
    assert not any(layer.training for layer in copied.sublayers())
    assert [type(layer) for layer in model.sublayers()] == training


def test_a_folder_that_is_no_export_is_not_replaced(tmp_path: Path, model: PPYOLOE) -> None:
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    with raises("out_not_ours"):
        export_model(model, tmp_path, tiny_spec())
    assert (tmp_path / "thesis.txt").read_text(encoding="utf-8") == "years of work"


@pytest.mark.slow
def test_new_export_replaces_only_files_of_the_old(
    tmp_path: Path, model: PPYOLOE, with_nms: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(with_nms, directory)
    (directory / "labels").mkdir()
    strangers = {"README.md": "mine", "labels/a.txt": "mine, too", ".env": "not yours"}
    for name, text in strangers.items():
        (directory / name).write_text(text, encoding="utf-8")
    here = directory.stat().st_ino
    before = {name: (directory / name).stat().st_ino for name in ("infer.yml", "model.pdiparams")}
    left = {name for name in ("model.onnx",) if (directory / name).is_file()}
    kept = {name: (directory / name).read_bytes() for name in left}

    first = export_model(model, directory, tiny_spec(), ("paddle",), nms_in_graph=False)
    assert {name: (directory / name).read_text() for name in strangers} == strangers
    assert {name: (directory / name).read_bytes() for name in left} == kept
    assert set(first.spec.earlier) == left and first.spec.onnx is None
    assert read_spec(directory) == first.spec
    assert directory.stat().st_ino == here
    assert all((directory / name).stat().st_ino != inode for name, inode in before.items())
    names = {"infer.yml", "model.json", "model.pdiparams", "README.md", "labels", ".env", *left}
    assert {path.name for path in directory.iterdir()} == names
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_strangers_file_of_a_needed_name_is_not_replaced(
    tmp_path: Path, model: PPYOLOE, with_nms: Path
) -> None:
    write_spec(tmp_path, read_spec(with_nms).model_copy(update={"paddle": None}))
    (tmp_path / "model.json").write_text("mine", encoding="utf-8")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with raises("out_not_ours", "infer.yml"):
        export_model(model, tmp_path, tiny_spec())
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


NAMES = ("infer.yml", "model.json", "model.pdiparams")


def export_until(directory: Path, stop_at: int, *, kill: bool) -> bool:
    """Exports in a forked process; whether that came to its end before step `stop_at`."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return (directory.parent / "ended").exists()
    steps = itertools.count(1)

    def stopping(step: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(steps) == stop_at:
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(5, "Input/output error")
            return step(*args, **kwargs)

        return call

    try:
        for name in ("mkdir", "write_text", "replace", "unlink"):
            setattr(Path, name, stopping(getattr(Path, name)))
        with draft_folder(directory) as draft:
            for name in NAMES:
                (draft / name).write_text("new", encoding="utf-8")
        (directory.parent / "ended").touch()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "kill", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["killed", "failed"]
)
@pytest.mark.parametrize(
    "earlier",
    [pytest.param(True, marks=pytest.mark.slow), False],
    ids=["over an earlier", "into a new folder"],
)
def test_interrupted_export_is_whole_or_absent_for_the_next(
    kill: bool, earlier: bool, tmp_path: Path, with_nms: Path
) -> None:
    def content(directory: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in directory.glob("*") if file.is_file()}

    old = content(with_nms) if earlier else {}
    new = old | dict.fromkeys(NAMES, b"new")
    for stop_at in itertools.count(1):
        directory = tmp_path / f"model{stop_at}"
        if earlier:
            shutil.copytree(with_nms, directory)
        ended = export_until(directory, stop_at, kill=kill)
        if (directory / "infer.yml").exists():
            assert content(directory) in (old, new), "a mixture of two exports can be loaded"
        _move_into_place(directory)  # as the next export begins
        assert content(directory) in (old, new)
        assert not list(directory.glob(".export*"))
        if ended:
            break
    assert stop_at > 8 and content(directory) == new


@pytest.mark.parametrize(
    ("spec", "code", "message"),
    [
        (
            tiny_spec(size=(64, 90)),
            "image_size_not_multiple",
            "image size 64x90: height and width must be multiples of 32",
        ),
        (
            tiny_spec(class_names=("one", "two")),
            "class_names_count",
            "2 class names for a model of 3 classes",
        ),
    ],
)
def test_spec_not_fitting_model_is_refused(
    tmp_path: Path, model: PPYOLOE, spec: InferenceSpec, code: str, message: str
) -> None:
    with pytest.raises(ExportError, match=message) as error:
        export_model(model, tmp_path / "model", spec)
    assert error.value.code == code
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    model = tiny_model()
    key, value = next(iter(model.state_dict().items()))
    value.set_value(paddle.full_like(value, float("nan")))
    with raises("weights_not_finite", str(key)):
        export_model(model, tmp_path / "model", tiny_spec())


def test_a_folder_without_infer_yml_is_no_model(tmp_path: Path) -> None:
    with raises("not_an_export", "infer.yml"):
        ExportedPredictor(tmp_path)


def test_a_missing_weight_file_is_named(tmp_path: Path, with_nms: Path) -> None:
    (tmp_path / "infer.yml").write_bytes((with_nms / "infer.yml").read_bytes())
    with raises("export_incomplete", "model.json", "infer.yml"):
        ExportedPredictor(tmp_path)


ROWS = np.array(
    [[0, 0.9, 0, 0, 10, 10], [0, 0.8, 50, 50, 60, 70], [2, 0.8, 50, 50, 60, 70]], np.float32
)


def test_equal_rows_in_any_order_are_explained() -> None:
    assert unexplained_rows(ROWS[::-1] + np.float32([0, 1e-5, 1e-3, 0, 0, 0]), ROWS, NMS) == 0


@pytest.mark.parametrize(
    ("column", "change"), [(0, 1), (1, -0.01), (2, 0.2)], ids=["class", "score", "box"]
)
def test_a_row_that_differs_counts_on_both_sides(column: int, change: float) -> None:
    other = ROWS.copy()
    other[1, column] += change
    assert unexplained_rows(other, ROWS, NMS) == 2


def test_row_counts_once_despite_many_partners() -> None:
    twice = np.concatenate([ROWS, ROWS[:1]])
    assert unexplained_rows(twice, ROWS, NMS) == 1


def test_missing_row_is_explained_by_threshold_tie() -> None:
    at_score = np.array([[1, NMS.score_threshold, 0, 0, 5, 5]], np.float32)
    at_overlap = np.array([[0, 0.85, 0, 0, 10, 7]], np.float32)  # IoU 0.7 with the first row
    for extra in (at_score, at_overlap):
        assert unexplained_rows(np.concatenate([ROWS, extra]), ROWS, NMS) == 0
    elsewhere = np.array([[0, 0.85, 0, 0, 10, 6]], np.float32)
    assert unexplained_rows(np.concatenate([ROWS, elsewhere]), ROWS, NMS) == 1


def test_either_of_two_tied_boxes_may_stay() -> None:
    one = np.array([[0, 0.9, 0, 0, 50, 50]], np.float32)
    other = one + np.float32([0, 1e-7, 2, 0, 2, 0])
    raw = np.array([[0.9, 0, 0], [0.9, 0, 0]], np.float32), np.concatenate([one, other])[:, 2:]
    assert unexplained_rows(other, one, NMS, raw) == 0
    moved = other + np.float32([0, 0, 1, 0, 1, 0])  # no box that the model predicts
    assert unexplained_rows(moved, one, NMS, raw) == 1
    assert unexplained_rows(other, one, NMS) == 2


def test_row_freed_by_lost_tie_is_explained() -> None:
    best, shift = [0, 0.95, 0, 0, 100, 100], 100 * 0.3 / 1.7  # IoU 0.7 with the best
    tied = [0, 0.9, shift, 0, 100 + shift, 100]
    behind = [0, 0.8, shift + 4, 0, 104 + shift, 100]
    got, true = np.float32([best, behind]), np.float32([best, tied])
    assert unexplained_rows(got, true, NMS) == 0
    assert unexplained_rows(got, np.float32([best]), NMS) == 1  # nothing was lost


def test_a_tie_at_the_limit_of_candidates_is_explained() -> None:
    nms = NMS.model_copy(update={"candidates": 1})
    one, other = ROWS[1:2], ROWS[1:2] + np.float32([0, 0, 90, 90, 90, 90])
    raw = np.float32([[0.8], [0.8]]), np.concatenate([one, other])[:, 2:]
    assert unexplained_rows(other, one, nms, raw) == 0
    raw[0][1] = 0.7
    assert unexplained_rows(other - np.float32([0, 0.1, 0, 0, 0, 0]), one, nms, raw) == 2


def test_zero_area_box_and_lost_row_are_explained() -> None:
    nms = NMS.model_copy(update={"keep": 3})
    thin = np.array([[0, 0.95, 30, 10, 30, 40]], np.float32)
    assert unexplained_rows(np.concatenate([thin, ROWS[:2]]), ROWS, nms) == 0
    assert unexplained_rows(np.concatenate([thin, ROWS[:2]]), ROWS, NMS) == 1


@pytest.mark.parametrize("change", [{"iou_threshold": 0.45}, {"iou_threshold": 0.6}, {"keep": 40}])
def test_another_suppression_is_not_explained_by_ties(change: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    corner, size = rng.uniform(0, 60, (1, 200, 2)), rng.uniform(10, 40, (1, 200, 2))
    boxes_BN4 = np.concatenate([corner, corner + size], axis=2).astype(np.float32)
    raw = rng.uniform(0, 1, (1, 200, 4)).astype(np.float32), boxes_BN4
    nms = NMSConfig(score_threshold=0.05, iou_threshold=0.5)

    def kept(nms: NMSConfig) -> tuple[np.ndarray, np.ndarray]:
        rows_R6, count_B = multiclass_nms(*map(paddle.to_tensor, raw), nms)
        return rows_R6.numpy(), count_B.numpy()

    found = suppressed_differences(kept(nms), raw, nms, "Paddle")
    assert (found.score, found.box, found.boxes, found.ties) == (0, 0, len(kept(nms)[0]), 0)
    rows_R6, _ = kept(nms.model_copy(update=change))
    assert unexplained_rows(rows_R6, kept(nms)[0], nms, (raw[0][0], raw[1][0])) >= 10
    with raises("export_differs"):
        suppressed_differences(kept(nms.model_copy(update=change)), raw, nms, "Paddle")


def test_non_finite_or_misshapen_output_disagrees() -> None:
    true = np.zeros((2, 5, 3)), np.zeros((2, 5, 4))
    moved = np.full((2, 5, 4), [0.0, 0.0, 0.02, 0.04])
    found = raw_differences((true[0] + 0.5, moved), true, "it")
    assert (found.score, found.box, found.boxes) == (0.5, 0.04, 10)
    large = np.full((2, 5, 4), [0.0, 0.0, 1000.0, 10.0])
    assert raw_differences((true[0], large + moved), (true[0], large), "it").box == (
        pytest.approx(0.02)
    )
    assert raw_differences(true[:1], true[:1], "it").box is None
    with raises("export_differs"):
        raw_differences((true[0], moved * np.nan), true, "it")
    with raises("export_differs"):
        raw_differences((true[0][:, :1], true[1]), true, "it")


def test_half_a_character_in_a_class_name_is_refused(tmp_path: Path, model: PPYOLOE) -> None:
    spec = tiny_spec(class_names=("red", "gr\ud800en", "blue"))
    with raises("class_name_unwritable", "'gr\\ud800en'"):
        export_model(model, tmp_path / "model", spec)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_low_precision_are_refused(dtype: str, tmp_path: Path) -> None:
    model = tiny_model()
    model.yolo_head.pred_cls[0].to(dtype=dtype)
    with raises("weights_not_float32"):
        export_model(model, tmp_path / "model", tiny_spec())
