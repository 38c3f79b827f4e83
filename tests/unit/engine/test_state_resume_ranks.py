"""Going on with several ranks: on another number of them, without a shared folder, after a kill."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ppdist.common.errors import UserError
from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import comm
from ppdist.engine.build import build_training
from ppdist.engine.continuation import Continuation
from tests.distributed import run_on_ranks
from tests.forked import ROOT
from tests.project import TINY_PPYOLOE, write_config
from tests.unit.engine.tiny import FASTEST, freeze_statistics, norms_of, tiny_config

HERE = "tests.unit.engine.test_state_resume_ranks"
TOTAL_BATCH = 4  # of ten images: three steps an epoch, the last of them smaller
OVERRIDES = (
    "train.epochs=4", "log.every_steps=1", "checkpoint.every_steps=2",
    "optimizer.reference_batch_size=8", "optimizer.lr=0.0003",
)  # fmt: skip


def train(argument):
    """Makes the runs of the argument, one after another, on the ranks of one start.

    Batch norm takes statistics that were fixed before the first step: those of a batch depend on
    how many of its images a rank has.
    """
    comm.init("cpu", DistributedConfig())
    for output, overrides, resume in argument["runs"]:
        folder = Path(output) / str(comm.rank()) if argument.get("apart") else Path(output)
        batch = f"train.batch_size_per_card={TOTAL_BATCH // comm.world_size()}"
        experiment = build_training(
            tiny_config(Path(argument["shapes"]), [*OVERRIDES, batch, *overrides], FASTEST),
            output_dir=folder,
            evaluate=False,
            resume=Continuation(folder if resume else None),
            command=["test"],
        )
        with experiment.log:
            model = experiment.trainer.train_step.model
            if argument["frozen"]:
                if not resume:
                    freeze_statistics(model)
                for layer in norms_of(model):
                    layer._use_global_stats = True
            assert experiment.trainer.fit() == 0
    return None


def on(ranks, argument):
    run_on_ranks(ranks, f"{HERE}:train", argument, seconds=300)


def losses(output):
    lines = (output / "metrics.jsonl").read_text().splitlines()
    found = {
        record["step"]: record["loss"] for record in map(json.loads, lines) if "loss" in record
    }
    assert sorted(found) == [*range(1, len(found) + 1)]
    return np.array([found[step] for step in sorted(found)])


def last(output):
    folder = output / "checkpoints" / "last"
    return {
        f"{group}/{key}": array
        for group in ("model", "ema", "optimizer")
        for key, array in load_file(folder / f"{group}.safetensors").items()
    }


def follow(shapes, tmp_path, record_property, *parts):
    """Compares a run on one rank with one that changes its ranks: (ranks, step at its end), ..."""
    argument = {"shapes": str(shapes), "frozen": True}
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    steps = f"train.max_steps={parts[-1][1]}"
    train({**argument, "runs": [(f"{whole}", [steps], False)]})
    for number, (ranks, end) in enumerate(parts):
        part = {**argument, "runs": [(f"{changed}", [f"train.max_steps={end}"], number > 0)]}
        on(ranks, part)  # also one: this process would keep the folder to itself until its end
    expected, found = losses(whole), losses(changed)
    assert len(expected) == parts[-1][1]
    difference = np.abs(found / expected - 1).max()
    record_property("figure", f"largest relative difference of a loss {difference:.1e}")
    print(f"largest relative difference of a loss: {difference:.1e}")
    assert difference < 1e-5
    assert "each step has the same images" in (changed / "train.log").read_text()


@pytest.mark.slow
def test_half_as_many_ranks_resume_with_same_losses(shapes, tmp_path, record_property):
    follow(shapes, tmp_path, record_property, (2, 4), (1, 9))  # changes amid the second epoch


@pytest.mark.slow
def test_1_2_and_4_ranks_resume_with_same_losses(shapes, tmp_path, record_property):
    follow(shapes, tmp_path, record_property, (1, 2), (4, 5), (2, 8), (1, 10))


@pytest.mark.slow
def test_ranks_without_shared_folder_load_via_rank_0(shapes, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    compressed = ["distributed.gradient_rank=2", "distributed.shard_optimizer=true"]
    runs = [
        (f"{whole}", [*compressed, "train.max_steps=6"], False),
        (f"{parts}", [*compressed, "train.max_steps=4"], False),
        (f"{parts}", [*compressed, "train.max_steps=6"], True),
    ]
    on(2, {"shapes": str(shapes), "frozen": False, "apart": True, "runs": runs})
    assert not (parts / "1" / "checkpoints").exists()
    assert (losses(whole / "0") == losses(parts / "0")).all()
    expected, found = last(whole / "0"), last(parts / "0")
    assert expected.keys() == found.keys()
    assert [key for key in expected if not np.array_equal(expected[key], found[key])] == []


def goes_on(argument):
    """Builds a run with a word after --resume of each rank's own; the end of what is said of it."""
    comm.init("cpu", DistributedConfig())
    word = argument["words"][comm.rank()]
    try:
        build_training(
            tiny_config(Path(argument["shapes"]), ["train.batch_size_per_card=2"], FASTEST),
            output_dir=Path(argument["output"]),
            evaluate=False,
            resume=Continuation(word),
            command=["test"],
        ).log.close()
    except UserError as error:
        return f"{error}"
    return "begun"


@pytest.mark.slow
@pytest.mark.parametrize("words", [("auto", "auto"), ("auto", "elsewhere")])
def test_rank_without_auto_is_refused_at_once(words, shapes, tmp_path):
    argument = {"shapes": str(shapes), "output": str(tmp_path / "run"), "words": words}
    said = run_on_ranks(2, f"{HERE}:goes_on", argument)
    if words[0] == words[1]:
        assert said == ["begun", "begun"]
    else:
        assert all("--resume: " in each and "auto on rank" in each for each in said), said


CONFIG = """
data: {workers: 1, augment: {mosaic: 0.5}, resize: letterbox}
train: {epochs: 4, batch_size_per_card: 2, clip_norm: 5.0}
optimizer: {lr: 0.003, reference_batch_size: 8}
checkpoint: {every_steps: 2}
log: {every_steps: 1, visualdl: false}
"""
KINDS = {
    "plain": [],
    "sharded": ["distributed.shard_optimizer=true", "optimizer.name=adamw"],
    "local SGD": ["distributed.sync_every=2"],
    "low rank": ["distributed.gradient_rank=2"],
}


def fleetrun(folder, output, overrides, *arguments, fault="", restarts=0):
    """Trains on two ranks as a user would; the exit code, and what was said."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PADDLE")}
    command = [
        sys.executable, "tools/launch.py", "--nproc_per_node", "2", "--log_dir", folder / "log",
        "--max_restart", restarts, "tests/faults/train.py", "-c", folder / "cfg.yml", *arguments,
        "-o", f"output_dir={output}", *overrides,
    ]  # fmt: skip
    ended = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        env={**clean, "OMP_NUM_THREADS": "1", "PPDIST_FAULT": fault},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_run_resumes_bit_for_bit_equal(kind, shapes, tmp_path):
    write_config(tmp_path, CONFIG, TINY_PPYOLOE, shapes)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, said = fleetrun(tmp_path, whole, KINDS[kind])
    assert code == 0, said
    code, said = fleetrun(tmp_path, parts, KINDS[kind], fault="kill@rank1:step8")
    assert code == 1, said
    code, said = fleetrun(tmp_path, parts, KINDS[kind], "--resume")
    assert code == 0, said
    assert "resumed from" in said
    assert (losses(whole) == losses(parts)).all()
    expected, found = last(whole), last(parts)
    assert expected.keys() == found.keys()
    assert [key for key in expected if not np.array_equal(expected[key], found[key])] == []


@pytest.mark.slow
def test_restarted_job_uses_own_checkpoints_only(shapes, tmp_path):
    write_config(tmp_path, CONFIG, TINY_PPYOLOE, shapes)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, said = fleetrun(tmp_path, whole, [])
    assert code == 0, said
    code, said = fleetrun(tmp_path, parts, ["seed=5"])  # the earlier run
    assert code == 0, said
    code, said = fleetrun(
        tmp_path, parts, [], fault="kill@rank0:step1,kill@rank1:step8", restarts=2
    )
    assert code == 0, said
    assert (losses(whole) == losses(parts)).all()
    expected, found = last(whole), last(parts)
    assert [key for key in expected if not np.array_equal(expected[key], found[key])] == []
    assert [path.name for path in parts.glob("*old-*")] == ["old-1"]
    earlier = (parts / "old-1" / "metrics.jsonl").read_text()
    assert '"step": 12, ' in earlier  # not overwritten by the attempt that was killed at step 1
