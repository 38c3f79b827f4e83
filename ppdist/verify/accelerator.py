"""Proves that this machine's cards train right, and says how fast.

Every part ends in one of three words:

    PASS      something was compared, and nothing was further off than it may be
    FAIL      something was
    NOT RUN   it could not be compared here; with the reason, and what was measured anyway

What a rank does by itself (kernels, one batch on card and CPU) runs in this process.  What trains
is a command that users run, too: each rank starts a process of it beside itself on its card, as a
rank of a run of their own (`Runs`).  So a rank that fails or hangs in a collective ends that run,
and the others hear of it; and 1, 2 and 4 of 8 cards train without the rest.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import paddle
from safetensors.numpy import load_file

from ppdist.benchmark.step import machine
from ppdist.common.child import own_environment, run_command
from ppdist.common.errors import ConfigError
from ppdist.common.files import make_folder, replace_file, write_json
from ppdist.config import ExperimentConfig, load_config
from ppdist.config.base import dump_yaml
from ppdist.config.evaluate import NMSConfig
from ppdist.data.boxes import box_iou
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.data.loading.loader import on_device
from ppdist.data.types import Arrays, Batch, DetectionSet
from ppdist.distributed import comm, device, heartbeat, paddle_api
from ppdist.distributed.store import free_ports
from ppdist.engine.build import build_batch_source, build_model, build_schedule_setup, loss_of
from ppdist.engine.data import images_of_epoch, read_sets
from ppdist.engine.train_step import add_up, normalise_losses, whole
from ppdist.losses.nms import multiclass_nms
from ppdist.models.base import Targets
from ppdist.verify import dp_equivalence
from ppdist.verify.dp_equivalence import ROUNDINGS, Rounding

Report = dict[str, Any]
PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
JSON_NAME, PAGE_NAME = "accelerator.json", "accelerator.md"


@dataclass
class Found:
    """Result of a part.

    FAIL with any problem, else NOT RUN with any reason, else PASS.
    """

    measured: Report = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    not_run: str = ""

    @property
    def verdict(self) -> str:
        return FAIL if self.problems else NOT_RUN if self.not_run else PASS

    def check(self, name: str, off: float, allowed: float) -> None:
        """Records an error; a problem if it exceeds `allowed` or is NaN."""
        self.measured[name] = off if math.isfinite(off) else f"{off}"  # JSON has no such number
        if not off <= allowed:
            self.problems.append(f"{name}: off by {off:.1e}, allowed {allowed:.1e}")


@dataclass(frozen=True)
class Options:
    """Amount of work, and the limits to meet.

    Attributes:
        steps: of the trainings in each precision; a tenth of them measures speed.
        efficiency: the least part of so many times the rate of one card.
        minutes: after these no further run starts, and a running one is stopped.
    """

    steps: int = 200
    efficiency: float = 0.8
    minutes: float = 30.0


@dataclass(frozen=True)
class Proof:
    """What the parts work with."""

    config: ExperimentConfig
    images: DetectionSet
    options: Options
    runs: "Runs"
    found: dict[str, Found] = field(default_factory=dict)  # by the parts before


class Part(NamedTuple):
    """A part of the proof.

    `card`, `ranks`: that it needs them: why it is not run without.
    """

    work: Callable[[Proof], Found]
    card: str = ""
    ranks: str = ""
    float32: bool = False  # the training in float32 passed


def attempt(part: Part, proof: Proof) -> Found:
    """Runs a part, where there is what it needs.  Collective."""
    if part.card and not device.on_accelerator():
        return Found(not_run=part.card)
    if part.ranks and comm.world_size() == 1:
        return Found(not_run=part.ranks)
    if part.float32 and proof.found["float32"].verdict != PASS:
        return Found(not_run="the training in float32, which it needs, did not pass")
    try:
        return part.work(proof)
    except OutOfTime as error:
        return Found(not_run=f"{error}")
    except RunFailed as error:
        return Found(problems=[*error.args])
    except Exception as error:  # the same on every rank, see `_everywhere` and `Runs`
        return Found(problems=[f"{type(error).__name__}: {error}"])


def verify_accelerator(
    config_file: str | None,
    overrides: Sequence[str],
    out: Path,
    command: Callable[[str], list[str]],
    options: Options,
) -> Report:
    """Runs all parts in order; writes a JSON and a page.

    Collective.

    Args:
        config_file: of the experiment; None: a small model and generated images.
        out: the same path on every host of the ranks.
        command: the words that start a command of ours, such as `train`.
    Raises: UserError, on every rank: the configuration or its data cannot be used.
    """
    deadline = time.monotonic() + 60 * options.minutes
    found: dict[str, Found] = {}
    seconds = dict.fromkeys(PARTS, 0.0)
    work = out / "work"

    def prepare() -> None:
        make_folder(out / "logs")
        if comm.local_rank() == 0:
            make_folder(work)
            if config_file is None:
                (work / "built_in.yml").write_text(BUILT_IN.format(data=work / "data"))
                make_shapes(work / "data", train=_IMAGES, val=2, size=_SIDE, seed=0)

    with ExitStack() as undo:
        if comm.local_rank() == 0:
            undo.callback(shutil.rmtree, work, ignore_errors=True)
        comm.run_on_all_ranks(prepare)
        source = config_file or str(work / "built_in.yml")
        config = comm.run_on_all_ranks(lambda: load_config(source, overrides))
        # So long some ranks wait for the others while these train.
        timeout = max(60 * options.minutes, config.distributed.timeout_seconds)
        waiting = config.distributed.model_copy(update={"timeout_seconds": timeout})
        try:
            comm.init(config.device, waiting)
        except ConfigError as error:  # on every rank
            if error.code != "card_without_code":
                raise
            found = {name: Found(not_run="no rank trains on such a card") for name in PARTS}
            found["kernels"] = Found(problems=[f"{error}"])
        else:
            images = read_sets(config.data, config.model.num_classes, False)[0]
            in_epoch = images_of_epoch(images, config.data.sampling) / _images_of_step(config)
            epochs = math.ceil((options.steps + 5) / math.ceil(in_epoch))  # of a small set many
            train = config.train.model_copy(update={"epochs": max(config.train.epochs, epochs)})
            config = config.model_copy(update={"train": train, "device": device.kind()})
            runs = Runs(config, out, command, deadline)
            proof = Proof(config, images, options, runs, found)
            for name, part in PARTS.items():
                began = time.monotonic()
                found[name] = attempt(part, proof)
                seconds[name] = time.monotonic() - began
                if comm.is_main():
                    print(line(name, found[name]), flush=True)
        report = {
            "machine": machine() | {"hosts": comm.all_gather_object(comm.host())},
            "config": config_file or "built in",
            "overrides": list(overrides),
            "options": asdict(options),
            "parts": {
                name: {"verdict": each.verdict, "seconds": seconds[name]} | asdict(each)
                for name, each in found.items()
            },
        }

        def write() -> None:
            write_json(out / JSON_NAME, report, indent=1)
            replace_file(out / PAGE_NAME, page(report).encode())

        comm.run_on_main(write)
    return report


_IMAGES, _SIDE = 96, 160  # made for whom gives no configuration
# A YOLOv5 of this size amplifies a rounding a hundred times as much, so it proves less.
BUILT_IN = """
data:
  root: {data}
  train: {{annotations: annotations/instances_train.json}}
  val: {{annotations: annotations/instances_val.json}}
  workers: 1
model:
  name: ppyoloe
  variant: plus
  depth_multiple: 0.33
  width_multiple: 0.25
  num_classes: 3
  image_size: [160, 160]
train: {{epochs: 20, batch_size_per_card: 4, clip_norm: 5.0, sync_bn: true}}
optimizer: {{lr: 0.002, reference_batch_size: 8}}
schedule: {{warmup_epochs: 0}}
"""


def _images_of_step(config: ExperimentConfig) -> int:
    """Over all ranks."""
    return config.train.micro_batches(comm.world_size()).total_batch


def _everywhere(work: Callable[[], Found]) -> Found:
    """Merges each rank's findings; measured numbers are those of rank 0.

    Collective.
    """
    told_W = comm.evaluate_on_all_ranks(work, say=asdict).said_W
    problems = [
        f"rank {rank}: {problem}"
        for rank, told in enumerate(told_W)
        for problem in told["problems"]
    ]
    reasons = [told["not_run"] for told in told_W if told["not_run"]]
    return Found(told_W[0]["measured"], problems, reasons[0] if reasons else "")


# Kernels


def kernels(_: Proof | None = None) -> Found:
    """Is this device alive: some kernels against numpy, and a sum.  Collective."""
    found = _everywhere(_own_kernels)
    world = comm.world_size()
    if world > 1 and not found.problems:
        total = comm.all_reduce_sum(paddle.to_tensor([float(comm.rank() + 1)])).item()
        found.measured["sum over ranks"] = total
        if total != world * (world + 1) / 2:
            found.problems.append(f"the sum of 1 to {world} over the ranks is {total:g}")
    return found


def _own_kernels() -> Found:
    rng = np.random.default_rng(0)
    image_HWC = rng.standard_normal((24, 20, 8)).astype(np.float32)
    weight_OCKK = rng.standard_normal((16, 8, 3, 3)).astype(np.float32)
    values = rng.standard_normal(100_000).astype(np.float32)
    left, right = (rng.standard_normal((96, 96)).astype(np.float32) for _ in range(2))
    scores_BNC = rng.random((2, 400, 3)).astype(np.float32)
    corner_BN2 = rng.uniform(0, 200, (2, 400, 2))
    boxes_BN4 = np.concatenate([corner_BN2, corner_BN2 + rng.uniform(20, 80, (2, 400, 2))], 2)
    boxes_BN4 = boxes_BN4.astype(np.float32)

    nms = NMSConfig(score_threshold=0.5, keep=1200)
    tensor, windows = paddle.to_tensor, np.lib.stride_tricks.sliding_window_view
    image_1CHW, image_HWC64 = image_HWC.transpose(2, 0, 1)[None], image_HWC.astype(np.float64)

    def suppress(scores_NC: np.ndarray, boxes_N4: np.ndarray) -> np.ndarray:
        """The rows of `multiclass_nms` for one image, the plain way."""
        iou_NN, rows = box_iou(boxes_N4, boxes_N4), []
        for label, score_N in enumerate(scores_NC.T):
            kept: list[int] = []
            for at in np.argsort(-score_N, kind="stable"):
                if score_N[at] > 0.5 and (iou_NN[at, kept] <= nms.iou_threshold).all():
                    kept.append(at)
                    rows.append([label, score_N[at], *boxes_N4[at]])
        return np.array(rows)

    with paddle_api.whole_float32():
        pairs = {
            "1 + 1": (paddle.ones([1]) + paddle.ones([1]), np.array([2.0])),
            "matrix product": (
                paddle.matmul(tensor(left), tensor(right)), left.astype(np.float64) @ right
            ),
            "convolution": (
                paddle.nn.functional.conv2d(tensor(image_1CHW), tensor(weight_OCKK))[0],
                np.einsum("hwckl,ockl->ohw", windows(image_HWC64, (3, 3), (0, 1)), weight_OCKK),
            ),
            "sort": (paddle.sort(tensor(values)), np.sort(values)),
            "suppression": (
                multiclass_nms(tensor(scores_BNC), tensor(boxes_BN4), nms)[0],
                np.concatenate([*map(suppress, scores_BNC, boxes_BN4)]),
            ),
        }  # fmt: skip
        return judge_kernels({name: (each.numpy(), right) for name, (each, right) in pairs.items()})


_KERNEL_TOLERANCE = 1e-5  # of the largest value


def judge_kernels(pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Found:
    """Largest error of each kernel, relative to the largest expected value."""
    result = Found()
    for name, (found, right) in pairs.items():
        off = math.inf
        if found.shape == right.shape:
            off = float(np.abs(found - right).max() / max(np.abs(right).max(), 1e-12))
        result.check(name, off, _KERNEL_TOLERANCE)
    return result


# One batch on card and CPU

Gradients = dict[str, np.ndarray]  # of each parameter, and `loss NAME`: [1]
_IMAGES_OF_BATCH = 4  # on a CPU a large model takes seconds for each
_LOSS_TOLERANCE, _GRADIENT_TOLERANCE = 1e-4, 1e-3  # relative; not measured on a GPU
_ROUNDINGS_ALLOWED = 10.0  # times what moving every weight by one rounding does on the CPU
_BLIND = 0.05  # where rounding explains more than this, a comparison proves nothing
_SMALL = 1e-3  # a gradient is measured by its own norm, or by this part of the whole one's


def card_against_cpu(proof: Proof) -> Found:
    """Compares a batch's losses and gradients on card and CPU.

    Each rank has a batch of its own; weights and images are equal on both devices.  Collective.
    """
    config, images = proof.config, proof.images
    alone = config.model_copy(update={"data": config.data.model_copy(update={"workers": 0})})
    schedule = build_schedule_setup(alone, images_of_epoch(images, alone.data.sampling))

    def work() -> Found:
        batch = next(build_batch_source(alone, images, schedule).batches(0, None))
        whole_arrays = {name: getattr(batch, name) for name in Arrays._fields}
        arrays = {name: np.asarray(x[:_IMAGES_OF_BATCH]) for name, x in whole_arrays.items()}
        weights = {key: each.numpy() for key, each in build_model(config).state_dict().items()}
        take = partial(
            losses_and_gradients, config, weights, arrays,
            schedule.steps_per_written_epoch, schedule.reference_batch,
        )  # fmt: skip
        with paddle_api.whole_float32():
            card = take()
        device.release_memory()
        with device.on_cpu():
            return judge_gradients(card, take(), take(moved=True))

    return _everywhere(work)


def losses_and_gradients(
    config: ExperimentConfig,
    weights: Mapping[str, np.ndarray],
    arrays: Mapping[str, np.ndarray],
    steps_per_epoch: float,
    reference_batch: int,
    moved: bool = False,
) -> Gradients:
    """Losses and gradients of the first step on the current device.

    Args: moved: perturb every weight by one rounding.
    """
    model = build_model(config)
    model.set_state_dict({key: paddle.to_tensor(each) for key, each in weights.items()})
    trained = {key: each for key, each in model.named_parameters() if not each.stop_gradient}
    if moved:
        before = {key: weights[key] for key in trained}
        Rounding(ROUNDINGS["float32"], 0.0).move(trained, before, 0)
    loss = loss_of(config.model.name).build(config.loss, model, steps_per_epoch, reference_batch)
    batch = Batch(**on_device(arrays))
    truth = batch.boxes_BM4, batch.labels_BM, batch.mask_BM
    model.train()
    loss.prepare(model, 0)
    global_normalizers = loss.local_normalizers(
        *truth, (batch.images_B3HW.shape[2], batch.images_B3HW.shape[3])
    )
    inputs = model.training_inputs(model.normalize(batch.images_B3HW), Targets.of(batch))
    output = loss(model(*inputs), *truth, 0, global_normalizers)
    assert output.total.place.is_cpu_place() == (not device.on_accelerator())
    sums: dict[str, paddle.Tensor] = {}
    add_up(sums, output)
    result = normalise_losses({name: each.item() for name, each in sums.items()})
    (whole(output) / result.divisor).backward()
    found = {f"loss {name}": np.array([value]) for name, value in result.losses.items()}
    for key, parameter in trained.items():
        if parameter.grad is not None:
            found[key] = parameter.grad.numpy()
    return found


def judge_gradients(card: Gradients, cpu: Gradients, moved: Gradients) -> Found:
    """Judges the card's losses and gradients against the CPU's.

    Each term of the loss relative to the loss, each gradient by the L2 norm of its difference.

    Args: moved: of the CPU, with weights perturbed by one rounding.
    """
    result, each_one, blind = Found(), Found(), 0
    if card.keys() != cpu.keys():
        odd = sorted(card.keys() ^ cpu.keys())
        result.problems.append(f"only one of the two has a gradient of {', '.join(odd[:5])}")
    size = math.sqrt(sum(np.square(cpu[key]).sum() for key in cpu if not key.startswith("loss ")))
    worst = {"losses": (0.0, ""), "gradients": (0.0, "")}
    for key in cpu.keys() & card.keys():
        group, tolerance = "gradients", _GRADIENT_TOLERANCE
        scale = max(float(np.linalg.norm(cpu[key])), _SMALL * size, 1e-12)
        if key.startswith("loss "):
            scale = max(abs(float(cpu["loss loss"][0])), 1e-12)
            group, tolerance = "losses", _LOSS_TOLERANCE
        off = float(np.linalg.norm(card[key] - cpu[key])) / scale
        rounding = float(np.linalg.norm(moved[key] - cpu[key])) / scale
        allowed = max(tolerance, _ROUNDINGS_ALLOWED * rounding)
        blind += not allowed <= _BLIND
        each_one.check(key, off, allowed)
        if not off <= worst[group][0]:
            worst[group] = (off, key)
    result.problems += each_one.problems
    if (hidden := len(result.problems) - 5) > 0:
        result.problems[5:] = [f"and {hidden} more"]
    for group, (_, key) in worst.items():
        result.measured[group] = {"furthest_off": each_one.measured.get(key, 0.0), "of": key}
    compared = len(each_one.measured)
    result.measured |= {"compared": compared, "explained_by_rounding": blind}
    if blind > compared / 2:
        result.not_run = f"rounding alone explains {_BLIND:.0%} of {blind} of {compared} of them"
    if not size > 0:
        result.not_run = "the CPU's gradient is 0 as well: nothing was compared"
    return result


# Runs beside the ranks

_GRACE_SECONDS = 20.0  # for a process that may be about to end by itself as another one did


class OutOfTime(Exception):
    """Raised on every rank alike: `Options.minutes` are over."""


class RunFailed(Exception):
    """Raised on every rank alike.  Args: what went wrong, a sentence each."""


class Runs:
    """Runs our commands on this job's cards.

    Each rank of ours starts one rank of the run.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        out: Path,
        command: Callable[[str], list[str]],
        deadline: float,
    ) -> None:
        """Collective.

        Args: deadline: by time.monotonic() of this rank; rank 0's counts.
        """
        self.config = config
        self.work, self.logs = out / "work", out / "logs"
        self._command = command
        self._deadline = deadline
        self._file = self.work / "config.yml"

        def write() -> None:
            if comm.local_rank() == 0:
                replace_file(self._file, dump_yaml(config).encode())

        comm.run_on_all_ranks(write)

    def start(
        self, name: str, words: Sequence[str], overrides: Sequence[str], *, count: int = 0
    ) -> None:
        """Runs to the end on the first `count` ranks (0: all).  Collective.

        Args: words: the command and its options, the configuration left out.
        Raises: OutOfTime, RunFailed: on every rank.
        """
        device.release_memory()  # the run needs the same card
        count = count or comm.world_size()
        left = comm.all_gather_object(self._deadline - time.monotonic())[0]
        if left <= 0:
            raise OutOfTime("there was no time left for it")
        ports_W = comm.all_gather_object(free_ports(2))  # of the rank, of a store
        sound, sounds = comm.alarm()
        alarmed: list[float] = []  # when
        problem, log = "", self.logs / f"{name}-{comm.rank()}.log"

        def is_over() -> bool:
            heartbeat.alive()
            if not alarmed and sounds():
                alarmed.append(time.monotonic())
            return bool(alarmed) and time.monotonic() > alarmed[0] + _GRACE_SECONDS

        if comm.rank() < count:
            words = [*self._command(words[0]), *words[1:], "-c", str(self._file)]
            words += ["-o", *overrides] if overrides else []
            environment = _environment(count, ports_W)
            try:
                code = run_command(words, log, left, environment=environment, stop=is_over)
            except OSError as error:
                problem = f"{error}"
            else:
                if code is None:
                    problem = _ENDED if alarmed else f"it did not end within {left:.0f} s"
                elif code:
                    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                    problem = f"exit code {code}: {(said or ['nothing'])[-1][-300:]} ({log})"
            if problem:
                sound()
        told_W = comm.all_gather_object(problem)
        first = [f"rank {rank}: {each}" for rank, each in enumerate(told_W) if each]
        causes = [each for each in first if not each.endswith(_ENDED)]
        if first:
            raise RunFailed(*(f"{name}: {each}" for each in (causes or first)[:3]))

    def measure(
        self,
        name: str,
        words: Sequence[str],
        overrides: Sequence[str],
        *,
        count: int = 0,
        judges: bool = False,
    ) -> Any:
        """Runs a command and returns its --json report; see `start`.

        Args: judges: its exit code is a verdict, on which the report says more.
        """
        file = self.work / f"{name}.json"
        try:
            self.start(name, [*words, "--json", str(file)], overrides, count=count)
        except RunFailed:
            if not judges or not comm.run_on_main(file.is_file):
                raise
        return comm.run_on_main(lambda: json.loads(file.read_text(encoding="utf-8")))

    def benchmark(
        self, name: str, steps: int, *overrides: str, count: int = 0, warmup: int = 0
    ) -> Report:
        """What `ppdist benchmark train` measured, its only variant's numbers with the rest."""
        words = ["benchmark", "train", "--steps", str(steps), "--warmup", str(warmup)]
        result = self.measure(name, words, overrides, count=count)["result"]
        return result | result["variants"]["base"]


_ENDED = "ended, because another rank's process failed"


def _environment(count: int, ports_W: Sequence[Sequence[int]]) -> dict[str, str]:
    """Environment of this rank in a run of the first `count` ranks."""
    own_variables = own_environment()
    if count == 1:
        return own_variables
    given = {key: value for key, value in os.environ.items() if key.startswith("PADDLE_")}
    hosts_W = comm.addresses()
    endpoints = [f"{hosts_W[rank]}:{ports_W[rank][0]}" for rank in range(count)]
    own = comm.rank() - comm.local_rank()
    return (
        own_variables
        | given
        | {
            "PADDLE_MASTER": f"{hosts_W[0]}:{ports_W[0][1]}",
            "PADDLE_TRAINERS_NUM": str(count),
            "PADDLE_GLOBAL_SIZE": str(count),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoints[comm.rank()],
            "PADDLE_LOCAL_SIZE": str(min(comm.local_size(), count - own)),
        }
    )


# Precision


_FLOAT32 = ("distributed.gradient_dtype=float32",)
_KEPT = ("images_per_second", "peak_allocated_bytes", "peak_reserved_bytes", "parameters")
# Of the first loss, which equal weights give, and of the mean of all.  Two such trainings part
# after a few steps: means of 25 losses were off by 2 %, that of all 200 by 0.1 % (on a CPU).
_LOSS_OFF = 0.01


def trained(proof: Proof, dtype: str = "float32") -> Found:
    """Trains without NaN; compares lower-precision AMP with float32.

    float16 may skip steps while it looks for its loss scale.  Collective.
    """
    overrides, expected = ["train.amp.enabled=false"], None
    if dtype != "float32":
        able = _everywhere(partial(_has_half, dtype))
        if able.verdict != PASS:
            return able
        overrides = ["train.amp.enabled=true", f"train.amp.dtype={dtype}"]
        expected = proof.found["float32"].measured["losses"]
    report = proof.runs.benchmark(dtype, proof.options.steps, *overrides, *_FLOAT32)
    skipped = 0 if dtype == "float16" else report["skipped_steps"]
    found = judge_training(report["losses"], skipped, expected)
    found.measured |= {name: report[name] for name in ("skipped_steps", *_KEPT)}
    return found


def _has_half(dtype: str) -> Found:
    """Whether AMP computes a product in this precision here, forward and backward."""
    if not device.has_half(dtype):
        return Found(not_run=f"Paddle says that {device.kind()} has no {dtype}")
    inputs = paddle.ones([8, 8])
    inputs.stop_gradient = False
    with paddle.amp.auto_cast(enable=True, dtype=dtype):
        product = paddle.matmul(inputs, inputs)
    product.sum().backward()
    if product.dtype != getattr(paddle, dtype):
        return Found(not_run=f"AMP computes in {product.dtype} here")
    return Found()


def judge_training(
    losses: Sequence[float], skipped: int, expected: Sequence[float] | None = None
) -> Found:
    """Checks for finite losses, no skipped steps, and expected loss values.

    The first and the mean loss are compared with the expected ones.

    Args: expected: of the training in float32; None: it is this one.
    """
    found = Found({"steps": len(losses), "mean_loss": fmean(losses), "losses": list(losses)})
    broken = [number for number, loss in enumerate(losses, 1) if not math.isfinite(loss)]
    if broken:
        found.problems.append(f"{len(broken)} losses are not finite, the first in step {broken[0]}")
    if skipped:
        found.problems.append(f"{skipped} steps were not applied: their gradients are not finite")
    if expected is not None:
        for name, of in (("first loss", lambda each: each[0]), ("mean loss", fmean)):
            right = of(expected)
            found.check(name, abs(of(losses) - right) / max(abs(right), 1e-12), _LOSS_OFF)
    return found


# Ranks


def cards_like_one(proof: Proof) -> Found:
    """Runs `ppdist verify equivalence` over epochs with a partial last step.

    Collective.
    """
    runs, total = proof.runs, _images_of_step(proof.config)
    overrides = [
        *("train.amp.enabled=false", *_FLOAT32, "schedule.warmup_epochs=0", "train.epochs=4"),
        f"data.train.limit={2 * total + max(1, total // 2)}",
    ]
    try:
        dp_equivalence.require_comparable(runs.config)
    except ConfigError as error:
        return Found(not_run=f"{error}")
    words = ["verify", "equivalence", "--steps", "6"]
    return judge_equivalence(runs.measure("equivalence", words, overrides, judges=True)[0])


def judge_equivalence(report: Report) -> Found:
    """Args: report: of `dp_equivalence.verify_ranks`."""
    verdict = dp_equivalence.verdict(report)
    off = {each["name"]: each["difference"] for each in report["measured"]}
    found = Found({"off": off, "steps": report["steps"], "lines": dp_equivalence.lines(report)})
    if verdict == FAIL:
        far = [each["name"] for each in report["measured"] if not each["passed"]]
        odd = report["ranks_with_other_weights"]
        found.problems += [f"too far off: {', '.join(far)}"] if far else []
        found.problems += [f"other weights than rank 0: rank {odd}"] if odd else []
    elif verdict != PASS:
        found.not_run = f"{verdict}: no step could have told right from wrong"
    return found


def speed(proof: Proof) -> Found:
    """Images a second on 1, 2, 4, ... and all cards.  Collective."""
    world, steps = comm.world_size(), max(2, proof.options.steps // 10)
    counts = [2**power for power in range(world.bit_length()) if 2**power < world] + [world]
    rates: dict[str, float] = {}
    for count in counts:
        warmup = max(1, steps // 4)
        report = proof.runs.benchmark(f"speed{count}", steps, count=count, warmup=warmup)
        rates[str(count)] = report["images_per_second"]
    return judge_speed(rates, proof.options.efficiency, device.on_accelerator())


def judge_speed(rates: Mapping[str, float], least: float, cards: bool) -> Found:
    """Args: rates: total images per second by number of ranks, including 1."""
    efficiency = {count: rate / rates["1"] / int(count) for count, rate in rates.items()}
    found = Found({"images_per_second": dict(rates), "efficiency": efficiency})
    if len(rates) == 1:
        found.not_run = "one rank only: measured, with nothing to compare"
    elif not cards:
        found.not_run = "ranks of a CPU share its cores: measured, not judged"
    else:
        found.problems = [
            f"{count} cards: {share:.0%} of {count} times the rate of one, asked for {least:.0%}"
            for count, share in efficiency.items()
            if not share >= least
        ]
    return found


def judge_memory(measured: Report) -> Found:
    """Compares the peak memory of a card with a lower bound.

    Args: measured: `peak_allocated_bytes`, `peak_reserved_bytes` and `parameters`.
    """
    peak, reserved = measured["peak_allocated_bytes"], measured["peak_reserved_bytes"]
    least = 2 * 4 * measured["parameters"]  # float32 weights and gradients
    found = Found({"peak_allocated_bytes": peak, "peak_reserved_bytes": reserved, "least": least})
    if peak < least:
        found.problems.append(
            f"{peak} bytes at most were allocated, weights and gradients: {least}"
        )
    if reserved < peak:
        found.problems.append(f"{reserved} bytes were reserved, but {peak} allocated")
    return found


# Resume

Checkpoint = dict[str, np.ndarray]


def resume(proof: Proof) -> Found:
    """Checks that a resumed run ends like an uninterrupted one.

    If they are not equal bit for bit, a third run, uninterrupted too, tells how far two equal runs
    differ on this device: sums of several blocks may be added in any order.  Collective.
    """
    steps, work = max(1, proof.options.steps // 40), proof.runs.work
    shared = [
        *(f"train.max_steps={2 * steps}", f"checkpoint.every_steps={steps}", "log.visualdl=false"),
        *("checkpoint.keep=3", "log.images=0"),
    ]
    middle = work / "whole" / "checkpoints" / f"step-{steps:08d}"
    measured: dict[str, Report] = {}

    def off(name: str) -> Report:
        return differences(*(_checkpoint(work / each) for each in ("whole", name)))

    for name in ("whole", "resumed", "again"):
        if name == "again" and not measured["resumed"]["tensors_that_differ"]:
            break
        words = ["train", *(["--resume", str(middle)] if name == "resumed" else [])]
        proof.runs.start(name, words, [*shared, f"output_dir={work / name}"])
        if name != "whole":
            measured[name] = comm.run_on_main(partial(off, name))
    return judge_resume(measured["resumed"], measured.get("again"))


def _checkpoint(folder: Path) -> Checkpoint:
    found: Checkpoint = {}
    for group in ("model", "ema", "optimizer"):
        file = folder / "checkpoints" / "last" / f"{group}.safetensors"
        if file.is_file():
            found |= {f"{group}/{key}": each for key, each in load_file(file).items()}
    return found


def differences(one: Checkpoint, other: Checkpoint) -> Report:
    """Number of tensors that differ in any bit, and their relative difference.

    The latter is the L2 norm of all differences by that of all tensors.
    """
    if one.keys() != other.keys() or not one:
        raise ValueError(f"the checkpoints hold {len(one)} and {len(other)} tensors")
    odd = [key for key, each in one.items() if each.tobytes() != other[key].tobytes()]
    wide = {key: one[key].astype(np.float64) for key in one}
    size = sum(float(np.square(each).sum()) for each in wide.values())
    off = sum(float(np.square(wide[key] - other[key]).sum()) for key in odd)
    relative = math.sqrt(off / max(size, 1e-24))
    return {
        "tensors": len(one),
        "tensors_that_differ": len(odd),
        "off": relative if math.isfinite(relative) else 1e9,  # JSON has no other number for it
    }


def judge_resume(resumed: Report, noise: Report | None) -> Found:
    """Args: noise: `differences` of two uninterrupted runs, where `resumed` has any."""
    found = Found({"resumed": resumed, "bit_for_bit": resumed["tensors_that_differ"] == 0})
    if noise is None:
        return found
    found.measured["uninterrupted_again"] = noise
    allowed = _ROUNDINGS_ALLOWED * noise["off"]
    if resumed["off"] > allowed:
        found.problems.append(
            f"{resumed['tensors_that_differ']} of {resumed['tensors']} tensors differ, off by "
            f"{resumed['off']:.1e}; two uninterrupted runs by {noise['off']:.1e}"
        )
    return found


PARTS = {
    "kernels": Part(kernels),
    "card against CPU": Part(
        card_against_cpu, card="this is the CPU: there is no card to be compared with it"
    ),
    "float32": Part(trained),
    "AMP bfloat16": Part(partial(trained, dtype="bfloat16"), float32=True),
    "AMP float16": Part(partial(trained, dtype="float16"), float32=True),
    "N cards like one": Part(cards_like_one, ranks="one rank only"),
    "speed": Part(speed),
    "memory": Part(
        lambda proof: judge_memory(proof.found["float32"].measured),
        card="Paddle counts the memory of cards, not of a CPU",
        float32=True,
    ),
    "resume": Part(resume),
}


# What is written


def line(name: str, found: Found) -> str:
    """`PASS     kernels`, and what went wrong or the reason."""
    why = "; ".join(found.problems) or found.not_run
    return f"{found.verdict:<8} {name}" + (f": {why}" if why else "")


def failed(report: Report) -> bool:
    """Whether any part did."""
    return any(part["verdict"] == FAIL for part in report["parts"].values())


def page(report: Report) -> str:
    """Markdown: the verdicts, the machine, and what each part measured."""
    facts, parts = report["machine"], report["parts"]
    ranks = f"{facts['ranks']} rank{'s' * (facts['ranks'] > 1)}"
    rows = [
        f"# Proof of {ranks} on {facts['device']}",
        "",
        f"Configuration: {report['config']} {' '.join(report['overrides'])}".rstrip() + "."
        f" Paddle {facts['paddle']}, {facts['processor']}, {facts['platform']},"
        f" hosts: {', '.join(dict.fromkeys(facts['hosts']))}.",
        "",
        "PASS: compared, and within what is allowed. NOT RUN: not compared here, for the reason"
        " given.",
        "",
        "| part | verdict | why | seconds |",
        "|---|---|---|---|",
    ]
    for name, part in parts.items():
        why = " ".join(("; ".join(part["problems"]) or part["not_run"]).replace("|", "\\|").split())
        rows.append(f"| {name} | {part['verdict']} | {why} | {part['seconds']:.0f} |")
    for name, part in parts.items():
        rows += ["", f"## {name}", ""] if part["measured"] else []
        for key, value in part["measured"].items():
            if key == "lines":
                rows += ["", "```", *value, "```"]
            elif isinstance(value, dict):
                inner = ", ".join(f"{name}: {_number(each)}" for name, each in value.items())
                rows.append(f"- {key}: {inner}")
            elif key != "losses":  # which the JSON has
                rows.append(f"- {key}: {_number(value)}")
    return "\n".join(rows) + "\n"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"
