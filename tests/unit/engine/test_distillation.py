"""A run with a teacher: what it learns, leaves and refuses, on one rank and on two."""

import shutil
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import nn
from safetensors.numpy import load_file

from ppdist.common.errors import ConfigError
from ppdist.cpu.layers import OneDNNConv2D
from ppdist.cpu.switch import use_onednn
from ppdist.engine.build import build_model
from ppdist.engine.distillation import build_distillation, read_teacher
from ppdist.models.weights import arrays_of
from tests.emulated_bfloat16 import EMULATED
from tests.errors import raises
from tests.unit.engine.teachers import distilled_config, write_teacher
from tests.unit.engine.tiny import (
    IMAGES,
    build_step,
    fixed_batch,
    init_cpu,
    take_step,
    tiny_config,
)

FAMILIES = ("ppyoloe", "yolov5", pytest.param("dfine", marks=pytest.mark.slow))
TERMS = ("logits", "features", "boxes")


class Teachers(dict):
    """Output folders of teachers by family, made where one is asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, model: str) -> Path:
        self[model] = write_teacher(self.folder / model, model=model)
        return self[model]


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> Teachers:
    return Teachers(tmp_path_factory.mktemp("teachers"))


@pytest.mark.slow
def test_teacher_is_run_folder_best_or_checkpoint(teachers, tmp_path):
    output = shutil.copytree(teachers["ppyoloe"], tmp_path / "run", symlinks=True)
    folder = output / "checkpoints"
    config = distilled_config(tmp_path, output)
    init_cpu()
    student = build_model(config)

    def meant(path: Path) -> Path:
        return read_teacher(path, config.model, student)[0]

    assert meant(output) == folder / "last"
    (folder / "best").symlink_to("step-00000001")
    assert meant(output) == folder / "best"
    assert meant(folder / "step-00000001") == folder / "step-00000001"
    for nothing in (tmp_path, tmp_path / "absent"):
        said = r"distill.teacher: .*: no checkpoint there; expected a"
        with pytest.raises(ConfigError, match=said):
            meant(nothing)


def test_a_teacher_may_be_of_a_version_with_other_keys(tmp_path):
    teacher = write_teacher(tmp_path, seen=False, more="gone: {key: 1}\n")
    config = distilled_config(tmp_path, teacher)
    source, read = read_teacher(teacher, config.model, build_model(config))
    kept, arrays = load_file(source / "ema.safetensors"), arrays_of(read)
    unmerged = arrays.keys() & kept.keys()
    assert unmerged and all((kept[key] == arrays[key]).all() for key in unmerged)


@pytest.mark.parametrize("model", FAMILIES)
def test_a_teacher_speaks_of_the_students_classes(model, tmp_path):
    teacher = write_teacher(tmp_path, model=model, seen=False, names=("red", "green", "blue"))
    config = distilled_config(tmp_path, teacher, model=model)
    student = build_model(config)
    before = student.rows_before_classes

    def by_class(value):
        """Puts the classes first, also of a linear layer's weights."""
        return value.T if value.ndim == 2 and value.shape[1] == before + 3 else value

    def rows(names):
        """Of each class in the class layers, by key."""
        read = read_teacher(teacher, config.model, student, names)[1]
        arrays = {
            key: by_class(value)
            for key, value in arrays_of(read).items()
            if key.startswith(student.class_layers)
        }
        return {
            key: value.reshape(-1, before + 3, *value.shape[1:])[:, before:]
            for key, value in arrays.items()
            if value.shape[0] % (before + 3) == 0
        }

    written, turned = rows(("red", "green", "blue")), rows(("blue", "red", "green"))
    assert written
    for key, value in written.items():
        np.testing.assert_array_equal(turned[key], value[:, [2, 0, 1]])
    with raises("classes_differ", str(teacher), "red, green, blue", "red, green, pink"):
        rows(("red", "green", "pink"))


@pytest.mark.parametrize("model", FAMILIES)
def test_steps_train_student_and_keep_teacher(model, teachers, tmp_path):
    init_cpu()
    config = distilled_config(tmp_path, teachers[model], model=model)
    step, rates = build_step(config, frozen=False)
    teacher = step.loss.distillation.teacher
    before = arrays_of(teacher)
    kept = load_file(teachers[model] / "checkpoints" / "last" / "ema.safetensors")
    start = arrays_of(step.model)
    results = []
    for number in range(2):
        batch = [fixed_batch(0, 0, IMAGES)]
        results.append(take_step(step, batch, number, rates))
    after = arrays_of(teacher)
    assert all((before[key] == after[key]).all() for key in before)
    unmerged = [key for key in before if key in kept]
    assert unmerged and all((kept[key] == before[key]).all() for key in unmerged)
    assert not teacher.training and all(p.grad is None for p in teacher.parameters())
    moved = [k for k, x in arrays_of(step.model).items() if not np.array_equal(x, start[k])]
    assert any(key.startswith("distillation.levels") for key in moved)
    names = [f"loss_distill_{name}" for name in TERMS]
    assert all(np.isfinite(result.losses[name]) for result in results for name in names)
    assert results[0].losses["loss_distill_features"] > 0
    assert results[0].losses["loss_distill_logits"] > 0


@pytest.mark.slow
def test_a_teacher_on_onednn_says_what_a_plain_one_says(teachers, tmp_path):
    init_cpu()
    config = distilled_config(tmp_path, teachers["ppyoloe"])
    student = build_model(config)
    images = fixed_batch(0, 0, 2).images_B3HW
    outputs = []
    for switch in (lambda model: 0, use_onednn):
        switch(student)
        teacher = build_distillation(config.distill, config.model, student, config.seed).teacher
        with paddle.no_grad():
            outputs.append(teacher(teacher.normalize(images)))
        fast = [type(x) for x in teacher.sublayers() if isinstance(x, nn.Conv2D)]
        assert (OneDNNConv2D in fast) == (switch is use_onednn)
        student.distillation = None
    plain, fast = ([*maps.class_logits, *maps.reg_dist, *maps.features] for maps in outputs)
    for one, other in zip(plain, fast, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(one.abs().max())


@pytest.mark.slow
def test_bfloat16_on_a_cpu_asks_the_teacher_too(teachers, tmp_path):
    init_cpu()
    amp = ("train.amp={enabled: true, dtype: bfloat16}", "train.cpu_kernels=auto")
    losses = []
    for overrides in (amp, amp[1:]):
        config = distilled_config(tmp_path, teachers["ppyoloe"], *overrides)
        step, rates = build_step(config, frozen=False, kernels=EMULATED)
        result = take_step(step, [fixed_batch(0, 0, IMAGES)], 0, rates)
        assert result.applied
        losses.append(result.losses)
    low, plain = losses
    assert low == pytest.approx(plain, rel=0.05) and low != plain


def test_uncompared_features_have_no_adapters(teachers, tmp_path):
    init_cpu()
    config = distilled_config(tmp_path, teachers["ppyoloe"], "distill.features=null")
    step, rates = build_step(config, frozen=False)
    assert step.model.distillation is None
    result = take_step(step, [fixed_batch(0, 0, IMAGES)], 0, rates)
    assert "loss_distill_features" not in result.losses


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (("ppyoloe", "model.num_classes=4"), "its model.num_classes is 4, the student has 3"),
        (("ppyoloe", "model.levels=P2-P5"), "strides (32, 16, 8, 4), the student has (32, 16, 8)"),
        (("yolov5", "seed=1"), "its model.name is yolov5, the student has ppyoloe"),
    ],
)
def test_a_teacher_of_something_else_is_refused(other, said, tmp_path):
    model, override = other
    teacher = write_teacher(tmp_path / "teacher", override, model=model, seen=False)
    with raises("teacher_unsuitable") as refused:
        build_step(distilled_config(tmp_path, teacher), frozen=False)
    assert said in f"{refused.value}"
    assert f"{refused.value}".startswith(f"distill.teacher: {teacher}/checkpoints/last: its ")


@pytest.mark.slow
def test_nms_free_teacher_teaches_by_other_head(teachers, tmp_path):
    student = ["model.one_to_one=true"]
    teacher = write_teacher(tmp_path / "teacher", *student, seen=False)
    step, rates = build_step(distilled_config(tmp_path, teacher, *student), frozen=False)
    head = arrays_of(step.loss.distillation.teacher)["yolo_head.pred_cls.0.weight"]
    ema = load_file(teacher / "checkpoints" / "last" / "ema.safetensors")
    assert (head == ema["yolo_head.pred_cls.0.weight"]).all()
    assert (head != ema["one_to_one_head.pred_cls.0.weight"]).any()
    result = take_step(step, [fixed_batch(0, 0, IMAGES)], 0, rates)
    assert {"loss_distill_logits", "loss_distill_boxes", "loss_one_to_one"} <= set(result.losses)


def test_settings_that_mean_nothing_are_refused(tmp_path):
    nothing = [f"distill.{name}=null" for name in TERMS]
    with raises("bad_value"):
        tiny_config(tmp_path, ["distill.teacher=x", *nothing])
    with raises("bad_value"):
        tiny_config(tmp_path, ["distill.teacher=x"], "yolov5_cls")
    assert tiny_config(tmp_path).distill is None
