"""Proves that many ranks train like one, on the user's data.

The ranks train some steps as configured.  Then rank 0, while the others wait, starts one process
that trains the same steps alone:

    train.sync_bn: false    1 rank, the same micro-batches one after the other: each is normalised
                            by its own statistics there as here
    train.sync_bn: true     1 rank, batches of all ranks together: as synchronised statistics see it

Two ways to add the same numbers differ by rounding, and training amplifies that; how far depends on
network and learning rate.  So the process alone trains once more with every weight moved by one
rounding in every step, and the ranks may be off by the tolerance or by a few times what that second
run is off by, step by step.  The first step begins with equal weights, so there little is allowed.
Where training has amplified a rounding to as much as it moves, a step proves nothing, and what no
step proves does not pass.  Averaged weights are held against the formula of the EMA, applied to
the weights beside them.

With synchronised statistics the second run computes batch norm by the program of gloo ranks, for
that is what differs (not on GPUs); and the run alone needs the images of all ranks on one card.
"""

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import paddle

from ppdist.benchmark.scaling import launch
from ppdist.common.errors import ConfigError, LaunchError
from ppdist.common.process import EXIT_DIR_VARIABLE
from ppdist.distributed import comm
from ppdist.verify.report import Report, compare, tolerance_of
from ppdist.verify.trace import Rounding, Trace, train_steps

if TYPE_CHECKING:
    from ppdist.config import ExperimentConfig


def require_comparable(config: "ExperimentConfig") -> None:
    """Raises: ConfigError: many ranks differ from one by design; names the keys to change."""
    reasons = []
    if config.train.batch_size_per_card == "auto":
        reasons.append("train.batch_size_per_card=8 (one rank has memory for another batch)")
    if getattr(config.model, "dropout", 0) > 0:
        reasons.append("model.dropout=0 (every rank drops other values)")
    if config.data.sampling.name == "difficulty":
        reasons.append("data.sampling.name=balanced (difficulty follows evaluations)")
    ranks = config.distributed
    if ranks.sync_every is not None:
        reasons.append("distributed.sync_every=null (ranks step on their own, each with its norm)")
    if ranks.topk_fraction is not None:
        reasons.append("distributed.topk_fraction=null (what is left out comes late)")
    if ranks.gradient_rank is not None:
        reasons.append("distributed.gradient_rank=null (what is left out comes late)")
    if reasons:
        raise ConfigError(
            "here many ranks differ from one by design",
            code="differs_by_design",
            fix=f"to compare the rest, add -o with {' and '.join(reasons)}",
        )


def alone_overrides(config: "ExperimentConfig", world: int) -> list[str]:
    """What makes one rank train as `world` ranks would."""
    train = config.train
    if train.sync_bn:
        return [f"train.batch_size_per_card={world * train.images_per_card}"]
    if train.total_batch is not None:  # the steps of one rank follow from it
        return [f"train.total_batch={train.total_batch}"]
    return [f"train.accumulate_steps={world * train.accumulate_steps}"]


def verify_ranks(config: "ExperimentConfig", steps: int, command: Sequence[str]) -> Report:
    """Trains on all ranks, then on rank 0 alone, and compares.  Every rank calls it.

    Args:
        command: runs `judge` in a process of its own, when the overrides for one rank and then
            `--alone FOLDER` are put behind it.
    Returns: what `judge` found, and which ranks do not hold rank 0's weights.
    Raises: ConfigError: many ranks differ from one by design; LaunchError: the process failed.
    """
    require_comparable(config)
    with redirect_stdout(sys.stderr):
        ranks = train_steps(config, steps)
    if comm.on_gpu():
        paddle.device.cuda.empty_cache()  # the process alone needs the same card
    digests = comm.all_gather_large_object(ranks["digest"].tobytes().hex())
    odd = [rank for rank, found in enumerate(digests) if found != digests[0]]
    world = comm.world_size()
    behind = [*command, "-o", *alone_overrides(config, world)]
    taken = len(ranks["norm/gradient"])
    job = {"ranks": world, "steps": taken, "steps_asked_for": steps}
    report = comm.run_on_main(lambda: _alone(behind, ranks, job))
    return {**report, "ranks_with_other_weights": odd}


def _alone(command: Sequence[str], ranks: Trace, job: Report) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "ranks.npz", **ranks)  # type: ignore[arg-type]
        (Path(folder) / "job.json").write_text(json.dumps(job), encoding="utf-8")
        environment = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("PADDLE_") and key != EXIT_DIR_VARIABLE
        }
        whole = [*command, "--alone", folder]
        done = subprocess.run(whole, stdout=sys.stderr, env=environment, check=False)
        if done.returncode:
            raise LaunchError(
                f"the run of one rank ended with exit code {done.returncode}, what it said is "
                f"above: {' '.join(whole)}",
                code="run_failed",
            )
        return json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))


def judge(config: "ExperimentConfig", folder: Path) -> None:
    """Trains alone what the ranks trained that left their trace in the folder; a report joins it.

    Args: config: with `alone_overrides`.
    """
    comm.init(config.device, config.distributed)
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    with np.load(folder / "ranks.npz") as file:
        ranks = dict(file)
    train = config.train
    with redirect_stdout(io.StringIO()):  # the ranks have said all of it
        alone = train_steps(config, job["steps"])
        moved = train_steps(config, job["steps"], Rounding.of(config))
    report = {
        **job,
        "one_rank": {
            "batch_size_per_card": train.images_per_card,
            "accumulate_steps": train.micro_steps(1),
        },
        "sync_bn": train.sync_bn,
    }
    report |= compare(
        ranks,
        alone,
        moved,
        tolerance=tolerance_of(config),
        # Running statistics move with every batch they see: alone, one after the other.
        statistics=train.sync_bn or job["ranks"] == 1,
    )
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")


def verify_on(launcher: Sequence[str], script: Sequence[str], count: int) -> Report:
    """Verifies on `count` ranks of this machine, through fleetrun.

    Args:
        launcher: command of fleetrun without its options.
        script: the command of `verify_ranks` on a rank, without --json; it ends with 1 when they
            differ.
    Raises: LaunchError: the run ended without a report.
    """
    return launch(launcher, script, count, environment=os.environ, verdicts=(0, 1))[0]
