"""A callback of your own: records the slowest steps of each rank.

    fleetrun --nproc_per_node 2 examples/callback.py -c demo -o data.root=output/demo_data

Every rank has its callbacks and calls them at the same moments, so they may use collectives. They
only observe; whatever changes the numbers is a key of the configuration.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from ppdist.cli.train import parse, train
from ppdist.common import process
from ppdist.distributed import comm
from ppdist.engine.callbacks import Callback, TrainingRun
from ppdist.engine.clock import StepSeconds
from ppdist.engine.step_policy import StepResult


class SlowestSteps(Callback):
    """A record of the steps of this rank that took longest, with the seconds of their parts."""

    def __init__(self, count: int = 3) -> None:
        self.count = count
        self.seconds: dict[int, StepSeconds] = {}
        self.folder = Path()

    def on_train_begin(self, run: TrainingRun) -> None:
        self.folder = run.output_dir

    def on_step_end(self, step: int, result: StepResult, lr: float, seconds: StepSeconds) -> None:
        self.seconds[step] = seconds

    def on_evaluate_end(self, step: int, metrics: Mapping[str, float], is_best: bool) -> None:
        print(f"after step {step}: mAP {metrics['mAP']:.3f}{', the best' if is_best else ''}")

    def on_train_end(self, step: int, reason: str) -> None:
        slowest = sorted(self.seconds, key=lambda step: -self.seconds[step].wall)[: self.count]
        rows = [{"step": step, **self.seconds[step]._asdict()} for step in slowest]
        file = self.folder / f"slowest_steps_{comm.rank()}.json"
        file.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    process.run(lambda: train(parse(), callbacks=[SlowestSteps()]))
