"""Where a run goes on, with which settings, and what it says about it."""

import hashlib
import json
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest

from ppdist.common.job import JOB_DIR_VARIABLE, note_saved
from ppdist.common.run_log import RunLog
from ppdist.config.experiment import load_config
from ppdist.config.train import MicroBatches
from ppdist.engine import resume as module
from ppdist.engine.callbacks import Callback
from ppdist.engine.changes import changes, require_same_settings
from ppdist.engine.checkpoint import path_of, read_checkpoint
from ppdist.engine.continuation import AUTO, Continuation
from ppdist.engine.evaluator import Evaluator
from ppdist.engine.output_dirs import OutputDirs
from ppdist.engine.parts import EvaluationStopped
from tests.errors import raises
from tests.unit.engine.runs import (
    assert_same_checkpoint,
    build_run,
    losses,
    records,
    run_to_end,
    said,
)  # fmt: skip
from tests.unit.engine.tiny import FASTEST, tiny_config

# ten images in batches of four: three steps an epoch, nine in all
OVERRIDES = (
    "train.batch_size_per_card=4", "train.epochs=3", "log.every_steps=1",
    "checkpoint.every_steps=2", "optimizer.reference_batch_size=8",
)  # fmt: skip


def build(data, output_dir, *overrides, **options):
    return build_run(data, output_dir, *OVERRIDES, *overrides, model=FASTEST, **options)


def run(data, output_dir, *overrides, **options):
    return run_to_end(data, output_dir, *OVERRIDES, *overrides, model=FASTEST, **options)


@pytest.fixture(scope="module")
def five_steps(shapes, tmp_path_factory):
    """What a run of five steps leaves: checkpoints of 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("five")

    class WaitForWriter(Callback):
        """Else a slow disk would leave out some of them."""

        def on_save(self, step: int) -> None:
            while not path_of(folder / "checkpoints", step).exists():
                time.sleep(0.01)

    run(shapes, folder, "train.max_steps=5", evaluate=True, callbacks=[WaitForWriter()])
    return folder


@pytest.fixture
def output(five_steps, tmp_path):
    return shutil.copytree(five_steps, tmp_path / "output", symlinks=True)


def logged_steps(output_dir):
    return [*losses(output_dir)]


def steps_in(folder):
    return sorted(int(path.name[-8:]) for path in folder.glob("step-*"))


def test_settings_are_told_apart_by_what_they_change(tmp_path):
    then = tiny_config(tmp_path)
    now = tiny_config(
        tmp_path,
        ["log.every_steps=3", "nms.keep=50", "optimizer.lr=1.0", "evaluate.every_epochs=4"],
    )
    found = changes(then, now, by_scores=False)
    assert [each.key for each in found.free] == ["evaluate.every_epochs", "log.every_steps"]
    assert [each.key for each in found.scores] == ["nms.keep"]
    assert [each.key for each in found.learned] == ["optimizer.lr"]
    found = changes(then, now, by_scores=True)
    learned = ["evaluate.every_epochs", "nms.keep", "optimizer.lr"]
    assert [each.key for each in found.learned] == learned


def test_settings_affecting_training_need_flag(shapes, output):
    longer = ["train.epochs=4", "optimizer.lr=0.001", "log.images=0"]
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    with raises("config_changed") as refused:
        run(shapes, output, *longer, resume=output)
    text = str(refused.value)
    assert "\n  optimizer.lr: 0.0002 then, 0.001 now\n  train.epochs: 3.0 then, 4.0 now\n" in text
    assert "step-00000005/config.yml" in text and "add --resume-changed" in text
    assert "log.images" not in text
    after = {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.is_file()}
    assert {path for path in before if before[path] != after[path]} <= {output / "run.lock"}
    run(shapes, output, *longer, "train.max_steps=6", resume=output, changed=True)
    assert "changed settings that affect" in said(output)
    assert logged_steps(output) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_other_code_than_the_checkpoints_is_said(shapes, output, monkeypatch):
    told = "was written by another version of ppdist"
    build(shapes, output, resume=output).log.close()
    assert told not in said(output)
    monkeypatch.setattr(module, "digest_of_package", lambda: "another")
    build(shapes, output, resume=output, changed=True).log.close()
    assert told not in said(output)
    build(shapes, output, resume=output).log.close()
    assert told in said(output)


@pytest.mark.slow
def test_another_training_set_is_noticed(shapes, output, tmp_path):
    other = shutil.copytree(shapes, tmp_path / "other")
    file = other / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    content["annotations"][0]["bbox"][2] -= 1
    file.write_text(json.dumps(content))
    with raises("checkpoint_of_other_data", "10 images then"):
        run(other, output, f"data.root={other}", resume=output)
    moved = shutil.copytree(shapes, tmp_path / "moved")
    run(moved, output, f"data.root={moved}", "train.max_steps=6", resume=output)
    assert logged_steps(output) == [1, 2, 3, 4, 5, 6]
    told = "image files of the training set have changed since the checkpoint"
    assert told not in said(output)
    image = next((moved / "images" / "train").iterdir())
    image.write_bytes(image.read_bytes() + b"more")
    build(moved, output, f"data.root={moved}", resume=output).log.close()
    assert told in said(output)


@pytest.mark.slow
def test_other_evaluation_metric_resets_best(shapes, output):
    experiment = build(shapes, output, evaluate=True, resume=output)
    experiment.log.close()
    assert np.isfinite(experiment.trainer.state.best)
    experiment = build(shapes, output, "evaluate.metric=mAP50", evaluate=True, resume=output)
    experiment.log.close()
    assert experiment.trainer.state.best == -np.inf
    assert "best is reset" in said(output)


def test_checkpoint_without_optimizer_is_not_resumed(shapes, output):
    path = output / "checkpoints" / "step-00000005"
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["optimizer.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with raises("checkpoint_without_optimizer"):
        run(shapes, output, resume=output)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("world"),
        lambda state: state.update(world=0),
        lambda state: state.update(micro_batch=0),
        lambda state: state.update(step="5"),
        lambda state: state.update(best_step=-1),
        lambda state: state["run"].update(images=[]),
        lambda state: state["run"].update(more=1),
        lambda state: state.update(losses={"pairs": 7}),
        lambda state: state.update(epoch_sums={"losses": {"loss": "1"}}),
    ],
)
def test_odd_state_with_right_checksum_is_damaged(change, output):
    """A KeyError or a TypeError, once."""
    step = output / "checkpoints" / "step-00000005"
    state = json.loads((step / "state.json").read_bytes())
    change(state)
    content = json.dumps(state).encode()
    (step / "state.json").write_bytes(content)
    manifest = json.loads((step / "manifest.json").read_bytes())
    manifest["files"]["state.json"]["sha256"] = hashlib.sha256(content).hexdigest()
    (step / "manifest.json").write_text(json.dumps(manifest))
    config = load_config(step / "config.yml")
    with raises("checkpoint_damaged"):
        module.find_start(Continuation(step, changed=True), OutputDirs(output), config)


def test_stop_in_late_evaluation_saves_checkpoint(shapes, output, tmp_path, monkeypatch):
    def stop(*_):
        raise EvaluationStopped

    monkeypatch.setattr(Evaluator, "evaluate", stop)
    other, path = tmp_path / "other", output / "checkpoints" / "step-00000004"
    experiment = build(shapes, other, "train.max_steps=4", evaluate=True, resume=path)
    with experiment.log:
        assert experiment.trainer.fit() == 75
    assert steps_in(other / "checkpoints") == [4]


@pytest.mark.slow
def test_run_may_resume_in_any_other_folder(shapes, output, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(output / "checkpoints", other / "checkpoints", symlinks=True)
    path = output / "checkpoints" / "step-00000004"
    run(shapes, other, evaluate=True, resume=path)
    run(shapes, output, evaluate=True, resume=output)
    assert steps_in(other / "old-1" / "checkpoints") == [3, 4, 5]
    assert steps_in(output / "checkpoints")[-1] == 9
    assert_same_checkpoint(output, other)


def test_a_finished_run_has_nothing_left_to_train(shapes, output):
    run(shapes, output, "train.max_steps=5", evaluate=True, resume=output)
    assert "nothing left to train" in said(output)
    run(shapes, output, "train.max_steps=3", evaluate=True, resume=output)
    assert steps_in(output / "checkpoints")[-1] == 5
    assert logged_steps(output) == [1, 2, 3, 4, 5]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The folder that fleetrun keeps from one attempt to the next."""
    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.setenv(JOB_DIR_VARIABLE, str(folder))
    return folder


def test_restart_ignores_checkpoints_of_earlier_run(shapes, job, output):
    # The job's first attempt was killed before it could move them aside: nothing is noted.
    experiment = build(shapes, output)
    experiment.log.close()
    assert experiment.trainer.state.step == 0
    old = output / "old-1"
    assert steps_in(old / "checkpoints") == [3, 4, 5]
    # The second was killed before its first checkpoint.
    experiment = build(shapes, output)
    experiment.log.close()
    assert experiment.trainer.state.step == 0
    assert '"loss"' in (old / "metrics.jsonl").read_text()
    assert not (output / "old-2").exists()  # of the attempt before this one nothing is kept


@pytest.mark.slow
def test_restart_of_resumed_run_begins_at_given_path(shapes, job, output, tmp_path):
    other = tmp_path / "other"
    path = output / "checkpoints" / "step-00000004"
    for expected in (4, 4, 6):  # killed before its first checkpoint; after it; and once more
        experiment = build(shapes, other, "train.max_steps=6", resume=path)
        with experiment.log:
            assert experiment.trainer.state.step == expected
            if (job / "again").exists():
                experiment.trainer.fit()
        (job / "again").touch()


def test_a_job_that_saved_nothing_knows_its_micro_batches(shapes, job, tmp_path, monkeypatch):
    """Also where it goes on with other hosts."""
    build(shapes, tmp_path, "train.max_steps=1").log.close()
    begun = json.loads((job / "run.json").read_text())["made_of"]
    assert begun["micro_batch"] == begun["batch_size_per_card"] and begun["world"] == 1
    config = tiny_config(shapes, OVERRIDES, FASTEST)
    start = module.find_start(Continuation(AUTO), OutputDirs(tmp_path), config)
    assert start.snapshot is None and start.made_of == begun


@pytest.mark.parametrize("sync_bn", [False, True])
def test_ranks_keep_micro_batches_of_an_older_checkpoint(
    sync_bn, shapes, five_steps, tmp_path, monkeypatch
):
    found = read_checkpoint(five_steps / "checkpoints" / "step-00000005")
    old = {**found.state, "world": 2, "total_batch": 16}  # 2 x 4 x 2
    del old["micro_batch"], old["sync_bn"]
    checkpoint = replace(found, state=old)
    monkeypatch.setattr(module, "_read_named_checkpoint", lambda source: (checkpoint, []))
    settings = [*OVERRIDES, "train.max_steps=5", f"train.sync_bn={json.dumps(sync_bn)}"]
    config = tiny_config(shapes, settings, FASTEST)
    asked = Continuation(five_steps, changed=True)
    monkeypatch.setattr(
        module, "require_same_settings", lambda *_: module.Changes(step=[], learned=[])
    )
    start = module.find_start(asked, OutputDirs(tmp_path), config)
    assert start.step == 5 and not start.in_place
    batches = module.resumed_micro_batches(start, config.train, follows=False)
    assert batches == MicroBatches(16, 8 if sync_bn else 4, sync_bn)
    assert start.notes[0].startswith("ranks: 2 then")


def test_config_of_other_version_is_shown_unguessed(tmp_path):
    (tmp_path / "config.yml").write_text("data: {root: here}\nno_such_key: 1\n")
    config = tiny_config(tmp_path)
    with raises("config_of_other_version"):
        require_same_settings(tmp_path, config, Continuation())
    assert require_same_settings(tmp_path, config, Continuation(changed=True)).learned


def test_auto_means_output_dir_with_checkpoint(shapes, five_steps, tmp_path):
    config = tiny_config(shapes, [*OVERRIDES, "train.max_steps=5"], FASTEST)
    (tmp_path / "checkpoints").mkdir()
    assert module.find_start(Continuation(AUTO), OutputDirs(tmp_path), config).step is None
    assert module.find_start(Continuation(AUTO), OutputDirs(five_steps), config).step == 5
    (tmp_path / "checkpoints" / "step-00000005").mkdir()  # torn: an error, rather than anew
    with raises("checkpoint_missing"):
        module.find_start(Continuation(AUTO), OutputDirs(tmp_path), config)


def test_steps_that_metrics_lack_are_said(shapes, output):
    """As after a power cut on a disk that keeps no order."""
    file = output / "metrics.jsonl"
    kept = [line for line in file.read_text().splitlines() if json.loads(line)["step"] <= 2]
    file.write_text("\n".join(kept) + "\n")
    build(shapes, output, "train.max_steps=6", resume=True).log.close()
    assert "steps 3 to" in said(output)


def test_records_of_a_checkpoint_are_on_disk_before_it(shapes, tmp_path, monkeypatch):
    """Those of the evaluation that made it the best, too."""
    synced = []

    def sync(log, seconds=30.0):
        there = [path.name for path in (tmp_path / "checkpoints").glob("step-*")]
        found = [each["step"] for each in records(tmp_path) if "mAP" in each]
        synced.append((max(logged_steps(tmp_path)), found, there))
        return True

    monkeypatch.setattr(RunLog, "sync", sync)
    run(shapes, tmp_path, "train.max_steps=3", "checkpoint.every_steps=100", evaluate=True)
    assert synced == [(3, [3], [])]


@pytest.mark.slow
@pytest.mark.parametrize("newest", [False, True], ids=["all", "the newest"])
def test_checkpoints_that_are_away_are_waited_for(newest, shapes, job, tmp_path, monkeypatch):
    """A file system of several hosts is mounted late, or shows an older one first."""
    output, away = tmp_path / "output", tmp_path / "away"
    run(shapes, output, "train.max_steps=4")
    missing = output / "checkpoints" / "step-00000004" if newest else output
    missing.rename(away)
    if newest:
        monkeypatch.setattr(time, "sleep", lambda seconds: None)
        experiment = build(shapes, output, "distributed.timeout_seconds=0.4")
        experiment.log.close()
        assert experiment.trainer.state.step == 2
        assert "skipped checkpoint" in said(output)
        note_saved(4)
    else:
        with raises("checkpoint_unreachable", "step 4", str(output)):
            build(shapes, output, "distributed.timeout_seconds=1")
        assert not (output / "metrics.jsonl").exists()

    def mount(seconds):
        if away.exists():
            shutil.rmtree(missing, ignore_errors=True)
            away.rename(missing)

    monkeypatch.setattr(time, "sleep", mount)
    experiment = build(shapes, output)  # the very command, which does not say --resume
    experiment.log.close()
    assert experiment.trainer.state.step == 4
    assert not (output / "old-1").exists()
