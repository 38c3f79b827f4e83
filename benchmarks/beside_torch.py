"""Compares our training steps with torch's: equal layers, one and two cores, in turns.

    python -m benchmarks.beside_torch [--models yolov5s yolov5n ppyoloe_plus_s dfine_n rtdetr_r18]
                                      [--dtypes float32 bfloat16] [--threads 1 2] [--steps 8]
                                      [--json FILE]

Ours is the trainer's whole step: normalisation, forward pass, loss, backward pass, clipping,
optimizer, EMA.  Torch's is the least that every trainer in it does: forward and backward pass of
the same layers (`benchmarks.torch_models`), channels last, the recipe's kind of optimizer; its loss
is the mean of squares, and nothing is matched, clipped or averaged.  Before anything is timed,
torch's model gets our weights, images and denoising queries, and has to give our outputs.  Each
runs in a process of its own, because both bring their own OpenMP; one steps while the other waits.
Where other programs run, compare CPU seconds.  bfloat16 is measured where the processor has
instructions for it.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

Report = dict[str, Any]
Step = Callable[[], object]
_SIDE, _WARMUP = 320, 2
_CLASSES = 3  # of drawn images
_TOLERANCE = 1e-4  # of the largest output
_DRAWN = 0.02  # standard deviation of weights that begin at 0, which would hide differences


class Case(NamedTuple):
    """A recipe of ours and its images in a step."""

    recipe: str
    batch: int


CASES = {
    **{f"yolov5{size}": Case(f"yolov5{size}_300e_coco", 8) for size in "nsmlx"},
    **{f"ppyoloe_plus_{size}": Case(f"ppyoloe_plus_{size}_80e_coco", 4) for size in "smlx"},
    "dfine_n": Case("dfine_n_160e_coco", 4),
    "dfine_s": Case("dfine_s_132e_coco", 4),
    "rtdetr_r18": Case("rtdetr_r18_72e_coco", 4),
    "rtdetr_r34": Case("rtdetr_r34_72e_coco", 4),
}
_USUAL = ("yolov5s", "yolov5n", "ppyoloe_plus_s", "dfine_n", "rtdetr_r18")


def measure(name: str, dtype: str, threads: int, steps: int, scratch: Path) -> Report:
    """Measures the medians of the wall and CPU seconds of both steps, and of the ratios of
    neighbours.

    Args: name: a row of `CASES`.  dtype: float32 or bfloat16.  threads: of each process.
    Returns: `ours` and `torch`, each with `wall`, `cpu` and `images_per_second`; `times_torch` and
        `times_torch_cpu`: torch's wall and CPU seconds over ours, median, smallest, largest.
    Raises: RuntimeError: a process failed, or the two do not compute the same.
    """
    scratch.mkdir(parents=True)
    with ExitStack() as stack:
        our_worker = stack.enter_context(_Worker("ours", name, dtype, threads, scratch))
        our_worker.ask("ready")
        torch_worker = stack.enter_context(_Worker("torch", name, dtype, threads, scratch))
        # Both models must compute the same before their times mean anything.
        _require_equal(our_worker.ask("ready"), torch_worker.ask("ready"), dtype)
        seconds: dict[str, list[list[float]]] = {"ours": [], "torch": []}
        for number in range(_WARMUP + steps):
            # Who goes first alternates, so that none always follows the other's warm caches.
            for worker in (
                (our_worker, torch_worker) if number % 2 == 0 else (torch_worker, our_worker)
            ):
                seconds[worker.name].append(worker.ask("step"))
    report: Report = {}
    for side, timings in seconds.items():
        wall, cpu = (median(column) for column in zip(*timings[_WARMUP:], strict=True))
        rate = CASES[name].batch / wall
        report[side] = {"wall": wall, "cpu": cpu, "images_per_second": rate}
    for column, key in enumerate(("times_torch", "times_torch_cpu")):
        pairs = zip(seconds["torch"][_WARMUP:], seconds["ours"][_WARMUP:], strict=True)
        ratios = [torch_step[column] / our_step[column] for torch_step, our_step in pairs]
        report[key] = [median(ratios), min(ratios), max(ratios)]
    return report


def _require_equal(our_files: list[str], torch_files: list[str], dtype: str) -> None:
    """Requires equal outputs in float32; bfloat16 is the same model.

    Raises: RuntimeError: they differ.
    """
    worst = 0.0
    for ours, theirs in zip(map(np.load, our_files), map(np.load, torch_files), strict=True):
        if ours.ndim == 3:  # [B, Q, X]: rounding may exchange queries whose logits are nearly equal
            ours, theirs = np.sort(ours, axis=1), np.sort(theirs, axis=1)
        worst = max(worst, float(np.abs(ours - theirs).max() / np.abs(ours).max()))
    if dtype == "float32" and not worst <= _TOLERANCE:
        raise RuntimeError(f"torch's outputs differ from ours by {worst:.1e} of the largest")


class _Worker:
    """A process that steps when it is asked to."""

    def __init__(self, side: str, name: str, dtype: str, threads: int, scratch: Path) -> None:
        self.name = side
        command = [sys.executable, "-m", __spec__.name, "--worker", side, name, dtype, str(scratch)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )  # fmt: skip

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *failure: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process of {self.name} ended; see above")
        return json.loads(answer)


def _serve(side: str, name: str, dtype: str, scratch: Path) -> None:
    """Answers `ready` with files of the outputs, `step` with wall and CPU seconds."""
    out = os.fdopen(os.dup(1), "w")
    with redirect_stdout(sys.stderr):
        files, step = (_make_our_step if side == "ours" else _make_torch_step)(name, dtype, scratch)
        for line in sys.stdin:
            if line.strip() == "ready":
                answer: Any = files
            else:
                began, cpu_began = time.perf_counter(), time.process_time()
                step()
                answer = [time.perf_counter() - began, time.process_time() - cpu_began]
            print(json.dumps(answer), file=out, flush=True)


def _make_our_step(name: str, dtype: str, scratch: Path) -> tuple[list[str], Step]:
    """Builds the trainer on drawn images; writes weights and inputs for torch.

    Returns: files of the model's outputs; the step.
    """
    import paddle

    from ppdist.config.experiment import load_config
    from ppdist.data.datasets.synthetic import make_shapes
    from ppdist.distributed import comm
    from ppdist.engine.build import build_training
    from ppdist.engine.clock import Clock
    from ppdist.models.base import Targets

    case = CASES[name]
    make_shapes(scratch / "data", train=4 * case.batch, val=1, size=_SIDE, seed=0)
    images = {"images": "images", "annotations": "annotations/instances_train.json"}
    amp = f"train.amp={{enabled: {str(dtype == 'bfloat16').lower()}, dtype: bfloat16, level: O2}}"
    overrides = [
        "data.format=coco", f"data.root={scratch / 'data'}", "data.workers=0",
        f"data.train={json.dumps(images)}", f"model.num_classes={_CLASSES}",
        f"model.image_size=[{_SIDE},{_SIDE}]", "train.multi_scale=[]",
        f"train.batch_size_per_card={case.batch}", "log.visualdl=false", amp,
    ]  # fmt: skip
    if name.startswith("yolov5"):
        from ppdist.models.yolov5 import P5_ANCHORS

        overrides.append(f"model.anchors={json.dumps(P5_ANCHORS)}")  # the images have their own
    config = load_config(case.recipe, overrides)
    comm.init("cpu", config.distributed)
    experiment = build_training(
        config, output_dir=scratch / "run", evaluate=False, command=["benchmark"]
    )
    experiment.log.close()
    trainer = experiment.trainer
    step, rates = trainer.train_step, trainer.schedule.lr_scheduler.rates(0)
    micro_batches = [*next(trainer.batch_source.steps(0, None))]
    if len(micro_batches) != 1:
        raise RuntimeError(f"a step of {name} has {len(micro_batches)} micro-batches, torch's one")
    model, batch = step.model, micro_batches[0]
    _draw_zeros(model)
    inputs = model.training_inputs(model.normalize(batch.images_B3HW), Targets.of(batch))
    about = {key: getattr(config.model, key, "") for key in ("name", "variant", "size")}
    (scratch / "model.json").write_text(json.dumps(about), encoding="utf-8")
    np.savez(scratch / "weights.npz", **{k: v.numpy() for k, v in model.state_dict().items()})
    np.savez(scratch / "inputs.npz", **_inputs_of_torch(model, *inputs))
    model.eval()
    with paddle.no_grad():
        files = _save_outputs(_in_order_of_torch(model(*inputs)), scratch / "ours")
    model.train()

    def once() -> None:
        # The first step's rates, so that the weights stay those that both began with.
        step([batch], 0, rates, Clock())

    return files, once


def _draw_zeros(model: Any) -> None:
    """Draws the weights that begin at 0, behind which all layers would output the same."""
    rng = np.random.default_rng(0)
    for weight in model.parameters():
        if weight.ndim > 1 and not weight.numpy().any():
            weight.set_value(rng.normal(0, _DRAWN, weight.shape).astype("float32"))


def _inputs_of_torch(model: Any, images_B3HW: Any, targets: Any = None) -> dict[str, np.ndarray]:
    """Returns the images, and for a DETR its denoising queries with their attention."""
    arrays = {"images_B3HW": images_B3HW.numpy()}
    if targets is None:
        return arrays
    import paddle

    from ppdist.models.attention import HIDDEN
    from ppdist.models.denoising import attention_bias

    height, width = images_B3HW.shape[2:]
    noisy = model.decoder.denoising(targets, paddle.to_tensor([width, height] * 2, "float32"))
    cells = sum(height // stride * (width // stride) for stride in model.decoder.strides)
    bias_B1DN = attention_bias(noisy.group_BD, min(model.decoder.queries, cells)).numpy()
    batch, _, slots, tokens = bias_B1DN.shape
    bias_B1NN = np.zeros([batch, 1, tokens, tokens], "float32")
    bias_B1NN[:, :, :slots], bias_B1NN[:, :, slots:, :slots] = bias_B1DN, HIDDEN
    return arrays | {
        "noisy_labels_BD": noisy.labels_BD.numpy(),
        "noisy_boxes_BD4": noisy.boxes_BD4.numpy(),
        "noisy_used_BD": noisy.used_BD.numpy(),
        "bias": bias_B1NN,
    }


def _in_order_of_torch(outputs: Any) -> list[np.ndarray]:
    """Returns a detector's outputs in the order in which `torch_models` has them."""
    if hasattr(outputs, "logits"):
        return [x.numpy() for x in outputs.logits]
    if hasattr(outputs, "class_logits"):
        return [x.numpy() for x in (*outputs.class_logits, *outputs.reg_dist)]
    denoised = outputs.denoised
    pairs = list(zip(denoised.layers, outputs.layers, strict=True))
    if outputs.preliminary is not None:
        pairs.insert(0, (denoised.preliminary, outputs.preliminary))
    arrays = [x.numpy() for x in outputs.encoder[:2]]
    for noisy, query in pairs:
        arrays += [
            np.concatenate([a.flatten(2).numpy(), b.flatten(2).numpy()], 1)
            for a, b in zip(noisy[:3], query[:3], strict=True)
            if a is not None
        ]
    return arrays


def _save_outputs(outputs: list[np.ndarray], file: Path) -> list[str]:
    files = [f"{file}-{index}.npy" for index in range(len(outputs))]
    for path, output in zip(files, outputs, strict=True):
        np.save(path, output)
    return files


def _make_torch_step(name: str, dtype: str, scratch: Path) -> tuple[list[str], Step]:
    """Builds torch's model with what ours wrote; returns files of its outputs, and the step."""
    import torch

    from benchmarks.torch_models import build_model

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    about = json.loads((scratch / "model.json").read_bytes())
    with np.load(scratch / "weights.npz") as weights:
        model = build_model(about["name"], about["variant"], about["size"], _CLASSES, dict(weights))
    with np.load(scratch / "inputs.npz") as arrays:
        inputs = {key: torch.from_numpy(array) for key, array in arrays.items()}
    inputs["images_B3HW"] = inputs["images_B3HW"].to(memory_format=torch.channels_last)
    model.eval()
    with torch.no_grad():
        files = _save_outputs([x.numpy() for x in model(**inputs)], scratch / "torch")
    model.train()
    if about["name"] == "rtdetr":
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-6)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, nesterov=True)

    def once() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            outputs = model(**inputs)
        sum(output.float().square().mean() for output in outputs).backward()
        optimizer.step()

    return files, once


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=[*CASES], default=_USUAL, metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], metavar="DTYPE")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        side, name, dtype, folder = arguments.worker
        _serve(side, name, dtype, Path(folder))
        return
    if importlib.util.find_spec("torch") is None:
        print("skipped: torch is not installed here; pip install torch==2.13.0")
        return
    from ppdist.common.files import write_json
    from ppdist.cpu.precision import missing_bfloat16

    usual = ["float32"] if missing_bfloat16() else ["float32", "bfloat16"]
    report: Report = {}
    for name in arguments.models:
        for dtype in arguments.dtypes or usual:
            for threads in arguments.threads:
                with tempfile.TemporaryDirectory() as folder:
                    result = measure(name, dtype, threads, arguments.steps, Path(folder) / "work")
                report[f"{name}, {dtype}, threads {threads}"] = result
                ours, theirs = (result[side]["images_per_second"] for side in ("ours", "torch"))
                wall, cpu = (
                    f"{middle:.2f} times torch ({smallest:.2f} to {largest:.2f})"
                    for middle, smallest, largest in (
                        result["times_torch"], result["times_torch_cpu"]
                    )
                )  # fmt: skip
                print(
                    f"{name}  {dtype}  threads {threads}  ours {ours:.2f} images/s  "
                    f"torch {theirs:.2f}  {wall}; CPU {cpu}",
                    flush=True,
                )
    if arguments.json:
        write_json(arguments.json, report, indent=1)


if __name__ == "__main__":
    main()
