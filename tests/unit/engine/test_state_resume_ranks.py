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
from tests.unit.engine.tiny import FASTEST, tiny_config

HERE = "tests.unit.engine.test_state_resume_ranks"
# Two micro-batches of two images, of ten: three steps an epoch, the last of them smaller.
OVERRIDES = (
    "train.epochs=4", "train.total_batch=4", "train.batch_size_per_card=2", "log.every_steps=1",
    "checkpoint.every_steps=2", "optimizer.reference_batch_size=8", "optimizer.lr=0.0003",
)  # fmt: skip


def train(argument):
    """Makes the runs of the argument, one after another, on the ranks of one start."""
    comm.init("cpu", DistributedConfig())
    for output, overrides, resume in argument["runs"]:
        folder = Path(output) / str(comm.rank()) if argument.get("apart") else Path(output)
        experiment = build_training(
            tiny_config(Path(argument["shapes"]), [*OVERRIDES, *overrides], FASTEST),
            output_dir=folder,
            evaluate=False,
            resume=Continuation(folder if resume else None),
            command=["test"],
        )
        with experiment.log:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "seed"),
    [
        ([], 0),
        (
            ["train.total_batch=6", "train.epochs=6"],
            1,
        ),  # three micro-batches on 2, 3, 1 and 2 ranks
        (["train.sync_bn=true"], 2),  # one of 4, spread over them
        (["train.total_batch=null", "distributed.shard_optimizer=true"], 3),  # 2 x 2 at first
    ],
)
def test_run_that_changes_its_ranks_equals_one_that_does_not(
    settings, seed, shapes, tmp_path, record_property
):
    draw = np.random.default_rng(seed)
    ends = [*sorted(draw.choice(np.arange(1, 11), 3, replace=False).tolist()), 11]
    argument = {"shapes": str(shapes)}
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    steps = [*settings, f"train.max_steps={ends[-1]}"]
    on(2, {**argument, "runs": [(f"{whole}", steps, False)]})
    for number, (ranks, end) in enumerate(zip((2, 3, 1, 2), ends)):
        steps = [*settings, f"train.max_steps={end}"]
        on(ranks, {**argument, "runs": [(f"{changed}", steps, number > 0)]})
    expected, found = losses(whole), losses(changed)
    assert len(expected) == len(found) == ends[-1]
    difference = np.abs(found / expected - 1).max()
    record_property("figure", f"largest relative difference of a loss {difference:.1e}")
    print(f"{settings}, ranks change after steps {ends}: losses {difference:.1e}")
    assert difference < 1e-5
    ours, theirs = last(changed), last(whole)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        np.testing.assert_allclose(ours[key], value, rtol=1e-3, atol=1e-5, err_msg=key)
    assert "each step has the same images and micro-batches" in (changed / "train.log").read_text()


@pytest.mark.slow
def test_ranks_without_shared_folder_load_via_rank_0(shapes, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    compressed = ["distributed.gradient_rank=2", "distributed.shard_optimizer=true"]
    runs = [
        (f"{whole}", [*compressed, "train.max_steps=6"], False),
        (f"{parts}", [*compressed, "train.max_steps=4"], False),
        (f"{parts}", [*compressed, "train.max_steps=6"], True),
    ]
    on(2, {"shapes": str(shapes), "apart": True, "runs": runs})
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
