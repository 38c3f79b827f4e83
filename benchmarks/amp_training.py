"""Trains in float32 and in emulated bfloat16, and prints what both come to.

    OMP_NUM_THREADS=1 python -m benchmarks.amp_training -c configs/examples/bccd_yolov5n.yml \
        --out /tmp/amp -o data.root=datasets/bccd train.epochs=20 --seeds 0 1 2

An experiment for docs/dev/performance.md, no test: emulation takes two to three times
the time of float32.  With --native the processor computes; it needs avx512_bf16 or amx_bf16.
"""

import argparse
import json
import time
from pathlib import Path

from ppdist.config.distributed import DistributedConfig
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.parse import parse_config
from ppdist.cpu.precision import BFLOAT16
from ppdist.distributed import comm
from ppdist.engine.build import build_training
from tests.emulated_bfloat16 import EMULATED


def train(config, folder, kernels):
    """Returns the losses of all logged steps, the metrics of the last evaluation, CPU seconds."""
    began = time.process_time()
    experiment = build_training(
        config, output_dir=folder, evaluate=True, command=["test"], kernels=kernels
    )
    with experiment.log:
        assert experiment.trainer.fit() == 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if "mAP" in line][-1]
    return {
        "mean_loss_of_last_quarter": mean([line["loss"] for line in lines if "loss" in line]),
        "mAP50": last["mAP50"], "mAP": last["mAP"],
        "cpu_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def mean(losses):
    last_quarter = losses[-len(losses) // 4 :]
    return sum(last_quarter) / len(last_quarter)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-c", required=True)
    parser.add_argument("-o", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--level", default="O1")
    parser.add_argument("--native", action="store_true")
    arguments = parser.parse_args()
    comm.init("cpu", DistributedConfig())
    amp = [
        "train.amp.enabled=true",
        "train.amp.dtype=bfloat16",
        f"train.amp.level={arguments.level}",
    ]
    for seed in arguments.seeds:
        for name, amp_overrides in (("float32", []), (f"bfloat16 {arguments.level}", amp)):
            config = parse_config(
                arguments.c, [*arguments.o, f"seed={seed}", *amp_overrides], ExperimentConfig
            )
            folder = arguments.out / f"{name.replace(' ', '-')}-{seed}"
            result = train(config, folder, BFLOAT16 if arguments.native else EMULATED)
            print(json.dumps({"seed": seed, "precision": name} | result), flush=True)


if __name__ == "__main__":
    main()
