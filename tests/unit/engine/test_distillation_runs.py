"""Whole runs with a teacher: their files, their evaluation, going on, and weights for others."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ppdist.common.errors import UserError
from ppdist.config.experiment import load_config
from ppdist.cpu.layers import OneDNNConv2D
from ppdist.cpu.switch import self_check
from ppdist.engine.build import build_model
from ppdist.engine.preflight import flat_config
from ppdist.export.export import export_model
from ppdist.models.weights import arrays_of, load_weights
from tests.errors import raises
from tests.unit.engine.runs import run_to_end
from tests.unit.engine.teachers import ALL, distilled_config, write_teacher
from tests.unit.engine.tiny import tiny_config
from tests.unit.export.tiny import tiny_spec

pytestmark = pytest.mark.slow

OVERRIDES = (
    "train.batch_size_per_card=4", "train.epochs=2", "log.every_steps=1",
    "checkpoint.every_steps=2", "optimizer.reference_batch_size=8", "train.max_steps=4",
    "train.cpu_kernels=auto",
)  # fmt: skip


def run(data, output_dir, *overrides, **options):
    return run_to_end(data, output_dir, *OVERRIDES, *overrides, **options)


def teach(teacher: Path) -> tuple[str, ...]:
    return (f"distill.teacher={teacher}", *ALL)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module", autouse=True)
def one_self_check():
    """oneDNN proves itself on the first model only; its own tests look at every kind of layer."""
    found = []

    def check_once(model, size):
        found[:] = found or [self_check(model, size)]
        return found[0]

    with pytest.MonkeyPatch.context() as patch:
        for module in ("build", "distillation"):
            patch.setattr(f"ppdist.engine.{module}.self_check", check_once)
        yield


@pytest.fixture(scope="module")
def taught(shapes, teacher, tmp_path_factory):
    """The output_dir of a run of four steps."""
    folder = tmp_path_factory.mktemp("taught")
    experiment = run(shapes, folder, *teach(teacher))
    layers = experiment.trainer.train_step.loss.distillation.teacher.sublayers()
    fast = any(
        type(layer) is OneDNNConv2D for layer in experiment.trainer.train_step.model.sublayers()
    )
    assert any(type(layer) is OneDNNConv2D for layer in layers) == fast
    return folder


def test_anchors_unlike_teacher_are_refused(shapes, tmp_path):
    teacher = write_teacher(tmp_path / "teacher", model="yolov5", seen=False)
    other = f"model.anchors={[[[20, 20]] * 3] * 3}"
    with pytest.raises(UserError, match=r"checkpoints/last: its anchors are others than the stud"):
        run(shapes, tmp_path / "out", *teach(teacher), other, model="yolov5")


def test_weights_of_a_student_need_no_teacher(taught, tmp_path):
    moved = shutil.copytree(taught, tmp_path / "moved", symlinks=True)
    file = moved / "checkpoints" / "last" / "config.yml"
    text = file.read_text()
    assert "teacher: " in text
    lines = [f"  teacher: {tmp_path}/nowhere" if "teacher: " in x else x for x in text.split("\n")]
    file.write_text("\n".join(lines))
    config = load_config(file)
    model = build_model(config)
    report = load_weights(model, taught / "checkpoints" / "last")
    assert set(report.loaded) == set(model.state_dict()) and not (report.fresh or report.ignored)


def test_a_teacher_may_move_but_not_become_another(taught, shapes, teacher, tmp_path):
    here = shutil.copytree(taught, tmp_path / "here", symlinks=True)
    moved = shutil.copytree(teacher, tmp_path / "moved", symlinks=True)
    run(shapes, here, *teach(moved), "train.max_steps=5", resume=True)
    manifest = moved / "checkpoints" / "last" / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")  # of other weights
    later = (*teach(moved), "train.max_steps=6")
    with raises("checkpoint_of_other_teacher"):
        run(shapes, here, *later, resume=True)
    run(shapes, here, *later, resume=True, changed=True)
    assert "another teacher" in (here / "train.log").read_text()


def test_resume_may_drop_teacher_not_add_features(taught, shapes, teacher, tmp_path):
    alone = shutil.copytree(taught, tmp_path / "alone", symlinks=True)
    run(shapes, alone, "train.max_steps=5", resume=True, changed=True)
    assert not (alone / "checkpoints" / "last" / "distillation.safetensors").exists()
    lesson = teach(teacher)
    with raises("checkpoint_without_distillation"):
        run(shapes, alone, "train.max_steps=6", *lesson, resume=True, changed=True)
    later = ("train.max_steps=6", *lesson, "distill.features=null")
    run(shapes, alone, *later, resume=True, changed=True)


def test_student_evaluates_and_exports_no_adapter(shapes, teacher, tmp_path):
    lesson = (*teach(teacher), "train.max_steps=3")
    experiment = run(shapes, tmp_path / "run", *lesson, evaluate=True)
    average = load_file(tmp_path / "run" / "checkpoints" / "last" / "ema.safetensors")
    evaluated = arrays_of(experiment.trainer.evaluations.model)
    assert evaluated.keys() == average.keys()
    assert all(np.array_equal(evaluated[key], average[key]) for key in average)
    assert '"mAP": ' in (tmp_path / "run" / "metrics.jsonl").read_text()
    model = build_model(tiny_config(shapes))
    load_weights(model, tmp_path / "run")
    export_model(model, tmp_path / "exported", tiny_spec(), nms_in_graph=False)  # compares
    assert (tmp_path / "exported" / "infer.yml").is_file()


def test_equal_width_teacher_needs_no_adapter(shapes, tmp_path):
    twin = write_teacher(tmp_path / "twin", "model.width_multiple=0.125", seen=False)
    run(shapes, tmp_path / "run", *teach(twin), "train.max_steps=1")
    assert '"loss_distill_features": ' in (tmp_path / "run" / "metrics.jsonl").read_text()
    folder = tmp_path / "run" / "checkpoints" / "last"
    assert not (folder / "distillation.safetensors").exists()
    run(shapes, tmp_path / "run", *teach(twin), "train.max_steps=2", resume=True)


def test_hosts_compare_what_their_teachers_are(teacher, tmp_path):
    other = write_teacher(tmp_path / "other", "model.num_classes=4", seen=False)
    facts = [flat_config(distilled_config(tmp_path, path)) for path in (teacher, other)]
    digests = [each["distill.teacher (its content)"] for each in facts]
    assert digests[0] != digests[1] and not any("cannot be read" in each for each in digests)
