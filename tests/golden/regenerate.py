"""Stores the losses that tests/integration/test_golden.py compares with; a reason is required.

    python -m tests.golden.regenerate --reason "why the numbers are allowed to change"

Do this only when a change of the arithmetic is wanted (initial weights, model, loss, optimizer,
schedule); a golden test that fails for another reason has found a bug.
"""

import argparse
import datetime
import json
import platform
import tempfile
from pathlib import Path

import numpy as np
import paddle

from ppdist.config.experiment import ExperimentConfig
from ppdist.engine.build import build_schedule_setup
from tests.unit.engine.tiny import IMAGES, build_step, fixed_batch, init_cpu, take_step, tiny_config

FOLDER = Path(__file__).parent
STEPS = 20
ATSS_STEPS = 10
DATASET = 16  # images tiny.py derives from: 2 steps an epoch of 8
DETECTORS = ("ppyoloe", "yolov5", "dfine", "rtdetr")


def golden_config(detector: str, folder: Path) -> ExperimentConfig:
    """The tiny detector of tests/unit/engine/tiny.py in Paddle's arithmetic; folder: scratch."""
    steps_per_epoch = DATASET // IMAGES
    overrides = ["schedule.warmup_epochs=2"]
    overrides += [f"train.epochs={STEPS // steps_per_epoch}", "train.cpu_kernels=plain"]
    if detector == "ppyoloe":
        overrides += ["optimizer.lr=0.01"]
        overrides += [f"loss.static_assigner_epochs={ATSS_STEPS // steps_per_epoch}"]
    elif detector in ("dfine", "rtdetr"):
        overrides += ["optimizer.lr=0.00002"]
    else:  # what its recipe has of its own, and decay enough to be seen
        overrides += ["optimizer.nesterov=true", "optimizer.decay_biases=false"]
        overrides += ["optimizer.weight_decay=0.05", "optimizer.momentum=0.937"]
        overrides += ["schedule.warmup_bias_lr=0.001", "schedule.warmup_momentum=0.8"]
    return tiny_config(folder, overrides, detector)


def golden_losses(detector: str, folder: Path) -> dict[str, list[float]]:
    """Total and parts of the loss, and the gradient norm, of each of the 20 steps; one process."""
    init_cpu()
    config = golden_config(detector, folder)
    train_step, _ = build_step(config, frozen=False)
    schedule = build_schedule_setup(config, DATASET).lr_scheduler
    losses: dict[str, list[float]] = {}
    for step in range(STEPS):
        batches = [fixed_batch(step, 0, IMAGES)]
        result = take_step(train_step, batches, step, schedule.rates(step))
        assert result.applied
        for name, value in {**result.losses, "gradient_norm": result.gradient_norm}.items():
            losses.setdefault(name, []).append(value)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reason", required=True, help="why the numbers change")
    parser.add_argument("--detector", nargs="+", choices=DETECTORS, default=DETECTORS)
    arguments = parser.parse_args()
    for detector in arguments.detector:
        with tempfile.TemporaryDirectory() as folder:
            losses = golden_losses(detector, Path(folder))
        content = {
            "reason": arguments.reason,
            "date": datetime.date.today().isoformat(),
            "versions": {
                "paddle": paddle.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
                "machine": platform.machine(),
            },
            "losses": {name: [float(f"{x:.9g}") for x in row] for name, row in losses.items()},
        }
        file = FOLDER / f"{detector}.json"
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
