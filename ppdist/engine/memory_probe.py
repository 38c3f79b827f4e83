"""A process that measures the memory of training steps.

    python -m ppdist.engine.memory_probe FOLDER

It reads FOLDER/job.json (`Job`), makes the largest steps of the run with one batch after another,
and after each adds a line to FOLDER/took.jsonl: the batch and the bytes that it took.  Whatever
ends it, an out-of-memory kill included, leaves the lines of the batches before.  An error of the
user's goes to FOLDER/mistake.

Exit codes: 0 done, 2 an error of the user's, 3 no memory, 1 anything else (traceback).
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppdist.common.errors import UserError, failure_of, is_out_of_memory
from ppdist.config.experiment import ExperimentConfig, experiment_of
from ppdist.data.types import Batch
from ppdist.distributed import comm
from ppdist.distributed.sync_batch_norm import take_sync_batch_norm
from ppdist.engine.auto_batch import MISTAKE, NO_MEMORY, Meter, largest_batch
from ppdist.engine.build import build_model, build_schedule_setup, build_train_step, speed_up_cpu
from ppdist.engine.clock import Clock
from ppdist.engine.state import TrainState, capture_state
from ppdist.optim.lr_scheduler import LearningRates


@dataclass(frozen=True)
class Job:
    """The description of a measurement, as stored in job.json."""

    config: dict[str, Any]  # of the run
    batches: list[int]  # images per micro-batch, ascending
    micro_batches: int  # per step, 1 or 2: the second adds its gradients to the first's
    objects: int  # padded boxes per image
    images: int  # per epoch
    several_ranks: bool  # if True, gradients are copied once, to be sent
    limits: dict[str, int]  # bytes by kind; the process stops before a batch that needs more


def main() -> None:
    """Runs the job in the folder named on the command line."""
    folder = Path(sys.argv[1])
    job = Job(**json.loads((folder / "job.json").read_text(encoding="utf-8")))
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")  # killed first
    try:
        _measure(job, folder / "took.jsonl")
    except UserError as error:
        (folder / "mistake").write_text(json.dumps(asdict(failure_of(error))), encoding="utf-8")
        sys.exit(MISTAKE)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        print(error, file=sys.stderr)
        sys.exit(NO_MEMORY)


def _measure(job: Job, file_of_results: Path) -> None:
    config = experiment_of(job.config, trusted=True)  # written by the run that started this process
    comm.init(config.device, config.distributed)
    meter = Meter()
    used_by_batch: dict[int, dict[str, int]] = {}
    with file_of_results.open("a", encoding="utf-8") as file:
        for used in _run_trials(config, job, meter):
            batch = job.batches[len(used_by_batch)]
            used_by_batch[batch] = used
            file.write(json.dumps({"batch": batch, "used": used}) + "\n")
            file.flush()
            following = job.batches[len(used_by_batch) : len(used_by_batch) + 1]
            if following and largest_batch(used_by_batch, job.limits, following[0]) < following[0]:
                break


def _run_trials(config: ExperimentConfig, job: Job, meter: Meter) -> Iterator[dict[str, int]]:
    """Yields the bytes of memory that each batch used, by kind.

    They include everything that a run keeps between steps.
    """
    model, evaluated = build_model(config), build_model(config)
    speed_up_cpu(config, [model, evaluated])
    schedule = build_schedule_setup(config, job.images)
    step = build_train_step(config, schedule, model)
    if config.train.sync_bn and job.several_ranks:
        take_sync_batch_norm(step.model)  # as on several ranks, where it is not fused into others
    rates = LearningRates(0.0, 0.0, config.optimizer.momentum)  # weights do not change
    trained = [p for p in model.parameters() if not p.stop_gradient]
    sent = sum(4 * p.size for p in trained) if job.several_ranks else 0
    by_area = sorted({*config.training_sizes}, key=lambda size: size[0] * size[1])
    last = schedule.total_steps - 1  # possibly with a different assigner than in the first step
    passes = [(by_area[-1], 0), (by_area[-1], last)]
    if len(by_area) > 1:  # memory freed by other sizes does not always fit the largest
        passes += [(by_area[0], last), (by_area[-1], last)]
    snapshots = None
    for batch in job.batches:
        for size, number in passes:
            drawn = _draw_batches(batch, job.objects, size, config.model.num_classes)
            step(islice(drawn, job.micro_batches), number, rates, Clock())
            if snapshots is None:  # one for rollback, one being written
                snapshots = [capture_state(step, TrainState(), schedule) for _ in range(2)]
        yield {kind: used + sent for kind, used in meter.peak().items()}


def _draw_batches(batch: int, objects: int, size: tuple[int, int], classes: int) -> Iterator[Batch]:
    """Yields batches of noise images with the largest number of objects.

    Args: size: (height, width) in pixels.
    """
    height, width = size
    draw = np.random.default_rng(0)
    corner_BM2 = draw.uniform(0, 0.5, (batch, objects, 2))
    side_BM2 = draw.uniform(0.02, 0.5, (batch, objects, 2))
    boxes_BM4 = np.concatenate([corner_BM2, corner_BM2 + side_BM2], 2) * ([width, height] * 2)
    for number in count():
        yield Batch(
            images_B3HW=paddle.to_tensor(draw.integers(0, 256, (batch, 3, *size), np.uint8)),
            boxes_BM4=paddle.to_tensor(boxes_BM4.astype("float32")),
            labels_BM=paddle.to_tensor(draw.integers(0, classes, (batch, objects))),
            mask_BM=paddle.ones([batch, objects]),
            image_index_B=paddle.arange(batch, dtype="int64"),
            scale_B2=paddle.ones([batch, 2]),
            offset_B2=paddle.zeros([batch, 2]),
            seeds_B=np.arange(batch),
            number=number,
        )


if __name__ == "__main__":
    main()
