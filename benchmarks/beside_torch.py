"""Compares training steps of YOLOv5 with torch's: equal layers, one and two cores, in turns.

    python -m benchmarks.beside_torch [--sizes s n] [--threads 1 2] [--steps 8] [--json FILE]

Ours is the trainer's whole step: normalisation, forward pass, loss, backward pass, clipping,
optimizer, EMA.  Torch's is the least that every trainer in it does: forward and backward pass of
the same layers, channels last, SGD with Nesterov's momentum; its loss is the mean of squares, and
nothing is matched, clipped or averaged.  Before anything is timed, torch's model gets our weights
and has to give our outputs.  Each runs in a process of its own, because both bring their own
OpenMP; one steps while the other waits.  bfloat16 is measured where the processor has instructions
for it.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

Report = dict[str, Any]
_SIDE, _BATCH, _WARMUP = 320, 8, 2
_CLASSES = 3  # of drawn images
_TOLERANCE = 1e-4  # of the largest output
_RECIPE = "yolov5{size}_300e_coco"


def measure(size: str, dtype: str, threads: int, steps: int, scratch: Path) -> Report:
    """Measures the medians of the wall and CPU seconds of both steps, and of the ratios of
    neighbours.

    Args: size: of YOLOv5, n to x.  dtype: float32 or bfloat16.  threads: of each process.
    Returns: `ours` and `torch`, each with `wall`, `cpu` and `images_per_second`; `times_torch`:
        torch's wall over ours, median, smallest, largest.
    Raises: RuntimeError: a process failed, or the two do not compute the same.
    """
    scratch.mkdir(parents=True)
    with ExitStack() as stack:
        our_worker = stack.enter_context(_Worker("ours", size, dtype, threads, scratch))
        our_worker.ask("ready")
        torch_worker = stack.enter_context(_Worker("torch", size, dtype, threads, scratch))
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
    for name, timings in seconds.items():
        wall, cpu = (median(column) for column in zip(*timings[_WARMUP:], strict=True))
        report[name] = {"wall": wall, "cpu": cpu, "images_per_second": _BATCH / wall}
    pairs = zip(seconds["torch"][_WARMUP:], seconds["ours"][_WARMUP:], strict=True)
    ratios = [torch_step[0] / our_step[0] for torch_step, our_step in pairs]
    report["times_torch"] = [median(ratios), min(ratios), max(ratios)]
    return report


def _require_equal(our_files: list[str], torch_files: list[str], dtype: str) -> None:
    """Requires equal outputs in float32; bfloat16 is the same model.

    Raises: RuntimeError: they differ.
    """
    pairs = zip(map(np.load, our_files), map(np.load, torch_files), strict=True)
    worst = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)
    if dtype == "float32" and not worst <= _TOLERANCE:
        raise RuntimeError(f"torch's outputs differ from ours by {worst:.1e} of the largest")


class _Worker:
    """A process that steps when it is asked to."""

    def __init__(self, name: str, size: str, dtype: str, threads: int, scratch: Path) -> None:
        self.name = name
        command = [sys.executable, "-m", __spec__.name, "--worker", name, size, dtype, str(scratch)]
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


def _serve(name: str, size: str, dtype: str, scratch: Path) -> None:
    """Answers `ready` with files of the outputs, `step` with wall and CPU seconds."""
    out = os.fdopen(os.dup(1), "w")
    with redirect_stdout(sys.stderr):
        files, step = (_make_our_step if name == "ours" else _make_torch_step)(size, dtype, scratch)
        for line in sys.stdin:
            if line.strip() == "ready":
                answer: Any = files
            else:
                began, cpu_began = time.perf_counter(), time.process_time()
                step()
                answer = [time.perf_counter() - began, time.process_time() - cpu_began]
            print(json.dumps(answer), file=out, flush=True)


def _make_our_step(size: str, dtype: str, scratch: Path) -> tuple[list[str], Any]:
    import paddle

    from ppdist.config.experiment import load_config
    from ppdist.data.datasets.synthetic import make_shapes
    from ppdist.distributed import comm
    from ppdist.engine.build import build_training
    from ppdist.engine.clock import Clock
    from ppdist.models.yolov5 import P5_ANCHORS

    make_shapes(scratch / "data", train=4 * _BATCH, val=1, size=_SIDE, seed=0)
    images = {"images": "images", "annotations": "annotations/instances_train.json"}
    amp = f"train.amp={{enabled: {str(dtype == 'bfloat16').lower()}, dtype: bfloat16, level: O2}}"
    overrides = [
        "data.format=coco", f"data.root={scratch / 'data'}", "data.workers=0",
        f"data.train={json.dumps(images)}", f"model.num_classes={_CLASSES}",
        f"model.image_size=[{_SIDE},{_SIDE}]",
        f"model.anchors={json.dumps(P5_ANCHORS)}", "train.multi_scale=[]",
        f"train.batch_size_per_card={_BATCH}", "log.visualdl=false", amp,
    ]  # fmt: skip
    config = load_config(_RECIPE.format(size=size), overrides)
    comm.init("cpu", config.distributed)
    experiment = build_training(
        config, output_dir=scratch / "run", evaluate=False, command=["benchmark"]
    )
    experiment.log.close()
    trainer = experiment.trainer
    step, rates = trainer.train_step, trainer.schedule.lr_scheduler.rates(0)
    micro_batches = [*next(trainer.batch_source.steps(0, None))]
    batch = micro_batches[0]
    micro_batches = [batch] * len(micro_batches)
    state = {key: value.numpy() for key, value in step.model.state_dict().items()}
    np.savez(scratch / "weights.npz", **state)
    inputs = step.model.normalize(batch.images_B3HW)
    np.save(scratch / "inputs.npy", inputs.numpy())
    step.model.eval()
    with paddle.no_grad():
        files = _save_outputs(
            [logits.numpy() for logits in step.model(inputs).logits], scratch / "ours"
        )
    step.model.train()

    def once() -> None:
        # The first step's rates, so that the weights stay those that both began with.
        step(micro_batches, 0, rates, Clock())

    return files, once


def _save_outputs(outputs: list[np.ndarray], file: Path) -> list[str]:
    files = [f"{file}-{level}.npy" for level in range(len(outputs))]
    for name, output in zip(files, outputs, strict=True):
        np.save(name, output)
    return files


def _make_torch_step(size: str, dtype: str, scratch: Path) -> tuple[list[str], Any]:
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = _torch_model(size)
    state = {}
    with np.load(scratch / "weights.npz") as arrays:
        names = {"_mean": "running_mean", "_variance": "running_var"}
        for key in arrays.files:
            *path, last = key.split(".")
            state[".".join([*path, names.get(last, last)])] = torch.from_numpy(arrays[key])
    state.pop("head.anchors")
    missing, unknown = model.load_state_dict(state, strict=False)
    if unknown or [key for key in missing if not key.endswith("num_batches_tracked")]:
        raise RuntimeError(f"other layers than ours: {missing + unknown}")
    model = model.to(memory_format=torch.channels_last)
    inputs = torch.from_numpy(np.load(scratch / "inputs.npy"))
    inputs = inputs.to(memory_format=torch.channels_last)
    model.eval()
    with torch.no_grad():
        files = _save_outputs([output.numpy() for output in model(inputs)], scratch / "torch")
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, nesterov=True)

    def once() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            outputs = model(inputs)
        sum(output.float().square().mean() for output in outputs).backward()
        optimizer.step()

    return files, once


def _torch_model(size: str) -> Any:
    """Builds the layers of `ppdist.models.yolov5` with its names (CSPDarknet, PAN, 1x1 heads)."""
    import torch
    from torch import nn

    from ppdist.models.backbones import CSPDarknet, scaled_repeats
    from ppdist.models.yolov5 import ANCHORS_PER_CELL, DEPTH_WIDTH, NECK_REPEATS

    depth, width = DEPTH_WIDTH[size]

    class Conv(nn.Module):
        def __init__(self, c_in: int, c_out: int, kernel: int, stride: int = 1, pad: int = -1):
            super().__init__()
            pad = kernel // 2 if pad < 0 else pad
            self.conv = nn.Conv2d(c_in, c_out, kernel, stride, pad, bias=False)
            self.bn = nn.BatchNorm2d(c_out, eps=1e-3, momentum=0.03)

        def forward(self, x: Any) -> Any:
            return nn.functional.silu(self.bn(self.conv(x)))

    class Bottleneck(nn.Module):
        def __init__(self, channels: int, residual: bool) -> None:
            super().__init__()
            self.conv1, self.conv2 = Conv(channels, channels, 1), Conv(channels, channels, 3)
            self.residual = residual

        def forward(self, x: Any) -> Any:
            y = self.conv2(self.conv1(x))
            return x + y if self.residual else y

    class C3(nn.Module):
        def __init__(self, c_in: int, c_out: int, blocks: int, residual: bool) -> None:
            super().__init__()
            half = c_out // 2
            self.conv1, self.conv2 = Conv(c_in, half, 1), Conv(c_in, half, 1)
            self.conv3 = Conv(2 * half, c_out, 1)
            self.blocks = nn.Sequential(*(Bottleneck(half, residual) for _ in range(blocks)))

        def forward(self, x: Any) -> Any:
            return self.conv3(torch.cat([self.blocks(self.conv1(x)), self.conv2(x)], 1))

    class SPPF(nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.conv1 = Conv(channels, channels // 2, 1)
            self.conv2 = Conv(channels * 2, channels, 1)

        def forward(self, x: Any) -> Any:
            maps = [self.conv1(x)]
            for _ in range(3):
                maps.append(nn.functional.max_pool2d(maps[-1], 5, 1, 2))
            return self.conv2(torch.cat(maps, 1))

    widths = [math.ceil(channels * width / 8) * 8 for channels in CSPDarknet.STAGE_CHANNELS[5]]
    c1, _, c3, c4, c5 = widths
    repeats = [scaled_repeats(blocks, depth) for blocks in CSPDarknet.STAGE_BLOCKS[5]]
    neck = scaled_repeats(NECK_REPEATS, depth)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            b, n, h = nn.Module(), nn.Module(), nn.Module()
            self.backbone, self.neck, self.head = b, n, h
            b.stem = Conv(3, c1, 6, 2, 2)
            for level in range(2, 6):
                c_in, c_out = widths[level - 2], widths[level - 1]
                b.add_module(f"down{level}", Conv(c_in, c_out, 3, 2))
                b.add_module(f"stage{level}", C3(c_out, c_out, repeats[level - 2], True))
            b.sppf = SPPF(c5)
            n.reduce5, n.topdown4 = Conv(c5, c4, 1), C3(2 * c4, c4, neck, False)
            n.reduce4, n.topdown3 = Conv(c4, c3, 1), C3(2 * c3, c3, neck, False)
            n.down4, n.bottomup4 = Conv(c3, c3, 3, 2), C3(2 * c3, c4, neck, False)
            n.down5, n.bottomup5 = Conv(c4, c4, 3, 2), C3(2 * c4, c5, neck, False)
            for level, channels in zip((3, 4, 5), (c3, c4, c5), strict=True):
                predict = nn.Conv2d(channels, ANCHORS_PER_CELL * (5 + _CLASSES), 1)
                h.add_module(f"predict{level}", predict)

        def forward(self, x: Any) -> list[Any]:
            b, n, h = self.backbone, self.neck, self.head
            x = b.stage2(b.down2(b.stem(x)))
            p3 = b.stage3(b.down3(x))
            p4 = b.stage4(b.down4(p3))
            p5 = n.reduce5(b.sppf(b.stage5(b.down5(p4))))
            p4 = n.reduce4(n.topdown4(torch.cat([double(p5), p4], 1)))
            p3 = n.topdown3(torch.cat([double(p4), p3], 1))
            p4 = n.bottomup4(torch.cat([n.down4(p3), p4], 1))
            p5 = n.bottomup5(torch.cat([n.down5(p4), p5], 1))
            return [h.predict3(p3), h.predict4(p4), h.predict5(p5)]

    def double(x: Any) -> Any:
        return nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")

    return Model()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", nargs="+", default=["s", "n"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, size, dtype, folder = arguments.worker
        return _serve(name, size, dtype, Path(folder))
    from ppdist.cpu.precision import missing_bfloat16

    dtypes = ["float32"] if missing_bfloat16() else ["float32", "bfloat16"]
    report: Report = {}
    for size in arguments.sizes:
        for dtype in dtypes:
            for threads in arguments.threads:
                with tempfile.TemporaryDirectory() as folder:
                    result = measure(size, dtype, threads, arguments.steps, Path(folder) / "work")
                report[f"YOLOv5{size}, {dtype}, threads {threads}"] = result
                middle, smallest, largest = result["times_torch"]
                our_rate, torch_rate = (
                    result[name]["images_per_second"] for name in ("ours", "torch")
                )
                print(
                    f"YOLOv5{size}  {dtype}  threads {threads}  ours {our_rate:.2f} images/s  "
                    f"torch {torch_rate:.2f}  {middle:.2f} times torch "
                    f"({smallest:.2f} to {largest:.2f})",
                    flush=True,
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
