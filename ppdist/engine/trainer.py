"""The loop: step, log, evaluate, save, stop; each a visible `if`, in that order."""

import math
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import paddle
from pydantic import Field

from ppdist import dist
from ppdist.checkpoint import Checkpoint, CheckpointConfig, path_of, point, prune, save_checkpoint
from ppdist.config import Section
from ppdist.data.sample import Batch
from ppdist.engine.bad_images import BadImages
from ppdist.engine.classification import ClassificationEvaluator
from ppdist.engine.derived import Derived
from ppdist.engine.evaluator import EvaluateConfig, Evaluator
from ppdist.engine.feed import ClassScores, Feed
from ppdist.engine.step import AmpConfig, Clock, StepResult, TrainStep
from ppdist.errors import CheckpointError
from ppdist.log import RunLog
from ppdist.models.detector import ImageModel
from ppdist.optim.averaging import next_synchronised
from ppdist.optim.ema import EMAConfig
from ppdist.optim.optimizer import load_optimizer_arrays, optimizer_arrays

STOPPED = 75  # exit code after a signal and a clean checkpoint
_MOST_BAD_STEPS = 10


class TrainConfig(Section):
    """Length, batch and numerics of training."""

    epochs: float = Field(default=300, gt=0, description="Passes over the training set.")
    max_steps: int | None = Field(
        default=None,
        gt=0,
        description="Stop after this many optimizer steps; the schedule still spans epochs.",
    )
    epochs_compensation: Literal["auto", "none"] = Field(
        default="none",
        description="auto: a total batch above the reference trains for more epochs, by "
        "optimizer.noise_scale, and all phases counted in epochs grow alike; none: epochs as "
        "written.",
    )
    batch_size_per_card: int = Field(default=8, gt=0, description="Images per rank and micro-step.")
    accumulate_steps: int = Field(
        default=1, gt=0, description="Micro-steps whose gradients make one optimizer step."
    )
    multi_scale: tuple[tuple[int, int], ...] = Field(
        default=(),
        description="Training sizes [[H, W], ...] in pixels, multiples of the largest stride; one "
        "is drawn per step for all ranks. Empty: model.image_size.",
    )
    amp: AmpConfig = Field(default=AmpConfig(), description="Automatic mixed precision.")
    sync_bn: bool = Field(
        default=False, description="Batch-norm statistics over all ranks instead of each its own."
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="Largest L2 norm of the whole gradient; null: no clipping."
    )
    ema: EMAConfig = Field(default=EMAConfig(), description="Averaged weights.")
    cpu_convolutions: Literal["auto", "plain"] = Field(
        default="auto",
        description="On CPU only. auto: oneDNN convolutions when they pass a self-check against "
        "eager at start-up; plain: Paddle's eager ones.",
    )


@dataclass
class Progress:
    """Where the run is; the first six go into checkpoints."""

    step: int = 0
    best: float = -math.inf
    best_step: int = 0
    bad_steps: int = 0  # in a row
    evaluated_step: int = 0
    class_scores: ClassScores | None = None  # by the last evaluation
    stop: bool = False  # this process was asked to stop
    window: list[tuple[StepResult, dict[str, float], float]] = field(default_factory=list)


class Trainer:
    """Trains until `derived.total_steps`; every rank builds one and calls `fit`."""

    def __init__(
        self,
        *,
        train_step: TrainStep,
        feed: Feed,
        bad_images: BadImages,
        derived: Derived,
        evaluator: Evaluator | ClassificationEvaluator | None,
        evaluated_model: ImageModel,
        log: RunLog,
        output_dir: Path,
        config_yaml: str,
        checkpoint: CheckpointConfig,
        evaluate: EvaluateConfig,
        log_every: int,
        seed: int,
    ) -> None:
        """
        Args:
            feed: this rank's micro-batches.
            evaluator: None: no evaluation during training.
            evaluated_model: a second model that takes the averaged weights for evaluation.
            seed: of what the model draws at random (dropout), together with step and rank.
        """
        self.train_step = train_step
        self.feed = feed
        self.bad_images = bad_images
        self.derived = derived
        self.evaluator = evaluator
        self.evaluated_model = evaluated_model
        self.log = log
        self.folder = output_dir / "checkpoints"
        self.config_yaml = config_yaml
        self.log_every = log_every
        self.seed = seed
        self.progress = Progress()
        self._saved_step = -1
        per_epoch = derived.steps_per_epoch
        save_every = checkpoint.every_steps or 0
        if checkpoint.every_steps is None and checkpoint.every_epochs > 0:
            save_every = max(1, round(checkpoint.every_epochs * per_epoch))
        every = train_step.averaging.every
        self.save_every = next_synchronised(save_every, every)
        evaluate_every = max(1, round(evaluate.every_epochs * per_epoch))
        self.evaluate_every = next_synchronised(evaluate_every, every)
        self.best_metric = evaluate.metric
        self.keep = checkpoint.keep

    def fit(self) -> int:
        """Runs to the end; returns 0, or 75 after a signal and a clean checkpoint.

        Raises: FloatingPointError: the loss or gradient was not finite for 10 steps in a row.
        """
        self._listen_for_signals()
        progress, total = self.progress, self.derived.total_steps
        if self.evaluator and self._missed_an_evaluation():
            self._evaluate(self.evaluator)
        batches = self.feed.batches(progress.step, progress.class_scores)
        while progress.step < total:
            result = self._step(batches)
            progress.step += 1
            ended = progress.step == total
            # Local SGD: the ranks ask again in each step until one ends with the same weights.
            stopping = result.stop_requested and result.synchronised and not ended
            if progress.step % self.log_every == 0 or ended:
                self._log_window()
            # Whoever asked to stop waits seconds for the checkpoint, not minutes for a number.
            if self.evaluator and self._due(self.evaluate_every, ended) and not stopping:
                self._evaluate(self.evaluator)
                if self.feed.follows_scores and not ended:
                    batches = self.feed.batches(progress.step, progress.class_scores)
            if self._due(self.save_every, ended) or stopping:
                self._save()
            if stopping:
                self.log.warning(
                    f"stopped by a signal after step {progress.step}; --resume continues from there"
                )
                return STOPPED
        return 0

    def _missed_an_evaluation(self) -> bool:
        """Whether one was due here, but whoever asked to stop did not wait for it."""
        step = self.progress.step
        return 0 < step != self.progress.evaluated_step and step % self.evaluate_every == 0

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continues from a checkpoint; every rank calls it before `fit`.

        Raises: CheckpointError: it belongs to a model of another shape or another total batch.
        """
        state = checkpoint.state
        if state["total_batch"] != self.derived.total_batch:
            raise CheckpointError(
                f"{checkpoint.path}: its steps are of {state['total_batch']} images, those of this "
                f"run of {self.derived.total_batch}; change train.accumulate_steps or "
                f"train.batch_size_per_card so that ranks x batch x micro-steps is the same"
            )
        step = self.train_step
        arrays = checkpoint.arrays("model") or {}
        live = {key: list(value.shape) for key, value in step.model.state_dict().items()}
        saved = {key: list(value.shape) for key, value in arrays.items()}
        if live != saved:
            odd = sorted(key for key in live | saved if live.get(key) != saved.get(key))
            raise CheckpointError(
                f"{checkpoint.path}: its model is another one: {odd[0]} is "
                f"{saved.get(odd[0], 'absent')} there and {live.get(odd[0], 'absent')} here; "
                f"resume with the configuration the run was started with"
            )
        copy_into(step.model.state_dict(), arrays)
        optimizer_state = checkpoint.arrays("optimizer")
        if optimizer_state is not None:
            if step.sharding is not None:
                optimizer_state = step.sharding.mine(optimizer_state)
            load_optimizer_arrays(step.optimizer, step.model, optimizer_state)
        lost = step.averaging.load(checkpoint.arrays("averaging") or {})
        if lost:
            self.log.warning(lost)
        if step.ema is not None:  # without an average in it, a new one starts at its weights
            step.ema.load(checkpoint.arrays("ema") or arrays, state["ema_updates"])
        if state["scaler"]:
            step.scaler.load_state_dict(state["scaler"])
        self.progress = Progress(
            step=state["step"],
            best=-math.inf if state["best"] is None else state["best"],
            best_step=state["best_step"],
            bad_steps=state["bad_steps"],
            # Absent in checkpoints before there were these:
            evaluated_step=state.get("evaluated_step", state["step"]),
            class_scores=state.get("class_scores"),
        )
        if dist.on_main(lambda: checkpoint.path.resolve().parent == self.folder.resolve()):
            self._saved_step = state["step"]

    def _step(self, batches: Iterator[Batch]) -> StepResult:
        progress = self.progress
        clock, started = Clock(), time.perf_counter()
        # Whatever the model draws is a function of the step, so that a resumed run draws the same.
        draws = np.random.SeedSequence([self.seed, progress.step, dist.rank()])
        paddle.seed(int(draws.generate_state(1)[0]))
        rates = self.derived.schedule.rates(progress.step)
        count, stop = self.derived.accumulate_steps, progress.stop
        known_bad = self.bad_images.known
        result = self.train_step(batches, count, progress.step, rates, stop, clock, known_bad)
        progress.window.append((result, clock.seconds, time.perf_counter() - started))
        if result.bad_somewhere:
            self._meet_bad_images(result.bad_images)
        progress.bad_steps = 0 if result.applied else progress.bad_steps + 1
        if not result.applied:
            self.log.warning(
                f"step {progress.step + 1}: loss {result.losses['loss']:g}, gradient norm "
                f"{result.gradient_norm:g}: not finite, so no rank applied it"
            )
        if progress.bad_steps >= _MOST_BAD_STEPS:
            raise FloatingPointError(
                f"loss or gradient was not finite for {_MOST_BAD_STEPS} steps in a row, up to step "
                f"{progress.step + 1}; lower optimizer.lr, set train.clip_norm, or turn train.amp "
                f"off; checkpoints up to here are intact"
            )
        recent = progress.window[-20:]
        speed = sum(done.images for done, _, _ in recent) / sum(wall for _, _, wall in recent)
        loss = f"{result.losses['loss']:.3f}"
        fields = {"loss": loss, "lr": f"{rates.lr:.2e}", "img/s": f"{speed:.1f}"}
        self.log.progress(progress.step + 1, fields)
        return result

    def _meet_bad_images(self, found: dict[int, str]) -> None:
        """Counts and names them; every rank calls it.  Raises: DataError, on every rank: too many.

        This rank's loader has warned of its own already; rank 0 alone writes the log.
        """
        for line in self.bad_images.meet(found):
            self.log.warning(f"cannot be used, another image takes its place: {line}")
        self.log.metrics({"step": self.progress.step + 1, "bad_images": len(self.bad_images.known)})

    def _due(self, every: int, ended: bool) -> bool:
        return ended or (every > 0 and self.progress.step % every == 0)

    def _log_window(self) -> None:
        """Means over the steps since the last record; rank 0 writes, the others drop theirs."""
        window, self.progress.window = self.progress.window, []
        if not window:
            return
        step = self.progress.step
        seconds = sum(wall for _, _, wall in window)
        record: dict[str, Any] = {"step": step, "epoch": step / self.derived.steps_per_epoch}
        for name in window[0][0].losses:
            record[name] = sum(result.losses[name] for result, _, _ in window) / len(window)
        record |= {
            "lr": self.derived.schedule(step - 1),
            "gradient_norm": sum(result.gradient_norm for result, _, _ in window) / len(window),
            "images_per_second": sum(result.images for result, _, _ in window) / seconds,
            "data_seconds": sum(parts["data"] for _, parts, _ in window) / len(window),
            "step_seconds": seconds / len(window),
        }
        self.log.metrics(record)

    def _evaluate(self, evaluator: Evaluator | ClassificationEvaluator) -> None:
        """Evaluates the averaged weights on all ranks; a new best is saved and named."""
        progress = self.progress
        progress.evaluated_step = progress.step
        self.load_evaluated_weights()
        metrics = evaluator.evaluate(self.evaluated_model)
        epoch = progress.step / self.derived.steps_per_epoch
        self.log.metrics({"step": progress.step, "epoch": epoch, **metrics})
        self.log.images("validation", progress.step, evaluator.pictures)
        shown = ", ".join(f"{name} {metrics[name]:.4f}" for name in evaluator.headline)
        self.log.info(f"step {progress.step} (epoch {epoch:.1f}): {shown}")
        if progress.step % self.evaluate_every == 0:
            # Not at an end amid an epoch: where this run resumed or a longer one has no evaluation.
            progress.class_scores = evaluator.class_scores(metrics)
        score = metrics[self.best_metric or evaluator.headline[0]]
        if score > progress.best:
            progress.best, progress.best_step = score, progress.step
            if self._saved_step != progress.step:
                self._save()
            else:  # Resumed here.  It lacks the score, but who resumes here again evaluates again.
                best, path = self.folder / "best", path_of(self.folder, progress.step)
                dist.on_main(lambda: point(best, path))

    def load_evaluated_weights(self) -> None:
        """Gives the second model the averaged weights, or the live ones without EMA."""
        ema = self.train_step.ema
        weights = dict(self.train_step.model.state_dict()) if ema is None else ema.average
        copy_into(self.evaluated_model.state_dict(), weights)

    def _save(self) -> None:
        """Rank 0 writes a checkpoint while the others wait; training outlives a full disk."""
        if self._saved_step == self.progress.step:
            return
        shared = self._of_all_ranks()
        failure = dist.on_main(lambda: self._write(shared))
        if failure:
            self.log.warning(f"{failure}; training goes on")
        else:
            self._saved_step = self.progress.step

    def _of_all_ranks(self) -> dict[str, dict[str, np.ndarray]]:
        """What rank 0 does not know alone; every rank calls it."""
        step = self.train_step
        groups = {}
        if step.sharding is not None:
            groups["optimizer"] = step.sharding.whole(optimizer_arrays(step.optimizer, step.model))
        residuals = step.averaging.state()
        if residuals:
            groups["averaging"] = residuals
        return groups

    def _write(self, shared: dict[str, dict[str, np.ndarray]]) -> str:
        """Writes it, names it `best` if it is, and deletes old ones; returns what went wrong."""
        step, progress = self.train_step, self.progress
        groups = {
            "model": {key: _array(value) for key, value in step.model.state_dict().items()},
            **shared,
        }
        if step.sharding is None:
            groups["optimizer"] = optimizer_arrays(step.optimizer, step.model)
        if step.ema is not None:
            groups["ema"] = step.ema.state()
        state = {
            "step": progress.step,
            "epoch": progress.step / self.derived.steps_per_epoch,
            "total_batch": self.derived.total_batch,
            "world": self.derived.world,
            "bucket_mb": dist.bucket_mb(),
            "best": progress.best if math.isfinite(progress.best) else None,
            "best_step": progress.best_step,
            "bad_steps": progress.bad_steps,
            "evaluated_step": progress.evaluated_step,
            "class_scores": progress.class_scores,
            "ema_updates": step.ema.updates if step.ema is not None else 0,
            "scaler": _plain(step.scaler.state_dict()),
        }
        try:
            path = save_checkpoint(self.folder, progress.step, groups, state, self.config_yaml)
            if progress.best_step == progress.step:
                point(self.folder / "best", path)
            prune(self.folder, self.keep)
        except (CheckpointError, OSError) as error:
            return str(error)
        return ""

    def _listen_for_signals(self) -> None:
        def ask_to_stop(number: int, frame: Any) -> None:
            self.progress.stop = True  # every rank hears of it in the next step's tally

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, ask_to_stop)


def copy_into(targets: dict[str, paddle.Tensor], sources: Mapping[str, Any]) -> None:
    """Overwrites tensors by arrays or tensors of the same keys and shapes, keeping their dtype."""
    for key, target in targets.items():
        source = sources[key]
        if not isinstance(source, paddle.Tensor):
            source = paddle.to_tensor(source)
        paddle.assign(source.astype(target.dtype), target)


def _array(tensor: paddle.Tensor) -> np.ndarray:
    """A float32 array of a tensor of low precision (numpy has no bfloat16), else one of its own."""
    low = tensor.dtype in (paddle.float16, paddle.bfloat16)
    return (tensor.astype("float32") if low else tensor).numpy()


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """GradScaler state as JSON holds it."""
    return {
        key: value.tolist() if hasattr(value, "tolist") else value for key, value in state.items()
    }
