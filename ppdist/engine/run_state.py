"""What a checkpoint holds of a training run: taken from it, and given back to it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import paddle

from ppdist import dist
from ppdist.checkpoint import Snapshot
from ppdist.engine.derived import Derived
from ppdist.engine.distillation import Distillation
from ppdist.engine.early_stopping import LossCurves, Standing
from ppdist.engine.feed import ClassScores
from ppdist.engine.step import TrainStep
from ppdist.errors import CheckpointError
from ppdist.optim.optimizer import load_optimizer_arrays, of_trained, optimizer_arrays


@dataclass
class Run:
    """What stays of a run from checkpoint to checkpoint, and tells it from others."""

    id: str  # drawn where it began
    images: int  # in the training set
    data: str  # a fingerprint of it
    schedule_steps: int
    bad_images: dict[int, str] = field(default_factory=dict)  # position in the set -> why
    teacher: str | None = None  # a fingerprint of its weights

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Run | None":
        """That of a checkpoint's state; None: the checkpoint is older than runs with an id."""
        if not state.get("run"):
            return None
        run = cls(**state["run"])
        run.bad_images = {int(index): why for index, why in run.bad_images.items()}
        return run


@dataclass
class Progress:
    """Where the run is; what stands before `stop` goes into checkpoints."""

    step: int = 0
    best: float = -math.inf
    best_step: int = 0
    bad_steps: int = 0  # in a row
    evaluated_step: int = 0
    class_scores: ClassScores | None = None  # by the last evaluation
    run: Run | None = None
    returns: int = 0  # to earlier weights, each for half the learning rate; see engine/recovery.py
    most_images: int | None = None  # of a micro-batch, once a rank had no memory for all of it
    standing: Standing | None = None  # with early_stopping, since the first evaluation
    losses: LossCurves = field(default_factory=LossCurves)
    stop: bool = False  # this process was asked to stop

    def go_back_to(self, earlier: "Progress") -> None:
        """Takes on where the run was; keeps what it has learned about itself since."""
        self.step, self.bad_steps = earlier.step, 0
        self.best, self.best_step = earlier.best, earlier.best_step
        self.evaluated_step, self.class_scores = earlier.evaluated_step, earlier.class_scores
        self.standing, self.losses = earlier.standing, earlier.losses


def take(step: TrainStep, progress: Progress, derived: Derived) -> Snapshot:
    """Every rank calls it; what rank 0 does not know alone is brought together."""
    optimizer = optimizer_arrays(step.optimizer, step.model)
    groups = {
        "model": {key: _array(value) for key, value in step.model.state_dict().items()},
        "optimizer": optimizer if step.sharding is None else step.sharding.whole(optimizer),
    }
    residuals = step.averaging.state()
    if residuals:
        groups["averaging"] = residuals
    if step.ema is not None:
        groups["ema"] = step.ema.state()
    state = {
        "step": progress.step,
        "epoch": progress.step / derived.steps_per_epoch,
        "total_batch": derived.total_batch,
        "batch_size_per_card": derived.batch_size_per_card,
        "world": derived.world,
        "bucket_mb": dist.bucket_mb(),
        "best": progress.best if math.isfinite(progress.best) else None,
        "best_step": progress.best_step,
        "bad_steps": progress.bad_steps,
        "evaluated_step": progress.evaluated_step,
        "class_scores": progress.class_scores,
        "run": None if progress.run is None else asdict(progress.run),
        "returns": progress.returns,
        "most_images": progress.most_images,
        "standing": None if progress.standing is None else asdict(progress.standing),
        "losses": asdict(progress.losses),
        "ema_updates": step.ema.updates if step.ema is not None else 0,
        "scaler": _plain(step.scaler.state_dict()),
    }
    return Snapshot(progress.step, _apart(groups), state)


def restore(saved: Snapshot, step: TrainStep) -> tuple[Progress, str]:
    """Gives a run what was taken from one with as many images in a step; every rank calls it.

    Returns: where the run is now; a warning, if something was lost or begun on the way.
    Raises: CheckpointError: it belongs to a model of another shape, or is not whole.
    """
    state = saved.state
    groups = _together(saved, step.distillation)
    arrays = groups["model"] or {}
    live = {key: list(value.shape) for key, value in step.model.state_dict().items()}
    there = {key: list(value.shape) for key, value in arrays.items()}
    if live != there:
        odd = sorted(key for key in live | there if live.get(key) != there.get(key))
        raise CheckpointError(
            f"the model of the checkpoint is another one: {odd[0]} is "
            f"{there.get(odd[0], 'absent')} there and {live.get(odd[0], 'absent')} here",
            code="checkpoint_of_other_config",
            fix="resume with the configuration the run was started with",
        )
    optimizer_state = groups["optimizer"]
    if optimizer_state is None:
        raise CheckpointError(
            f"the checkpoint of step {state['step']} has no optimizer.safetensors, without which "
            "the run cannot go on as it was",
            code="checkpoint_without_optimizer",
            fix="begin a new one with its weights: model.pretrained=PATH",
        )
    copy_into(step.model.state_dict(), arrays)
    optimizer_state, begun = of_trained(step.optimizer, step.model, optimizer_state)
    if step.sharding is not None:
        optimizer_state = step.sharding.mine(optimizer_state)
    load_optimizer_arrays(step.optimizer, step.model, optimizer_state)
    lost = step.averaging.load(saved.arrays("averaging") or {})
    if step.ema is not None:  # without an average in it, a new one starts at its weights
        step.ema.load(groups["ema"] or arrays, state["ema_updates"])
    if state["scaler"]:
        step.scaler.load_state_dict(state["scaler"])
    progress = Progress(
        step=state["step"],
        best=-math.inf if state["best"] is None else state["best"],
        best_step=state["best_step"],
        bad_steps=state["bad_steps"],
        # Absent in checkpoints before there were these:
        evaluated_step=state.get("evaluated_step", state["step"]),
        class_scores=state.get("class_scores"),
        run=Run.of(state),
        returns=state.get("returns", 0),
        most_images=state.get("most_images"),
        standing=Standing(**state["standing"]) if state.get("standing") else None,
        losses=LossCurves(**state.get("losses", {})),
    )
    return progress, "; ".join(filter(None, [begun, lost]))


_Groups = dict[str, dict[str, np.ndarray]]
_OWN = "distillation."  # of the student's sublayer that only a teacher's lessons need


def _apart(groups: _Groups) -> _Groups:
    """What only distillation needs in a group of its own, `<group>/<key>`, so that weights and
    average are those of a model that was never taught, and its optimizer's state, too."""
    own: dict[str, np.ndarray] = {}
    kept: _Groups = {}
    for name in ("model", "optimizer", "ema"):
        for key, array in groups.get(name, {}).items():
            if key.startswith(_OWN):
                own[f"{name}/{key}"] = array
            else:
                kept.setdefault(name, {})[key] = array
    return groups | kept | ({"distillation": own} if own else {})


def _together(
    saved: Snapshot, distillation: Distillation | None
) -> dict[str, dict[str, np.ndarray] | None]:
    """The groups as they were before `_apart`; without a teacher, without what it needs.

    Raises: CheckpointError: there is a teacher now whose adapters the checkpoint lacks.
    """
    groups = {name: saved.arrays(name) for name in ("model", "optimizer", "ema")}
    if distillation is None or not distillation.adapts:
        return groups
    own = saved.arrays("distillation")
    if own is None:
        raise CheckpointError(
            f"the checkpoint of step {saved.state['step']} has no distillation.safetensors, which "
            "distill.features needs: it was trained without",
            code="checkpoint_without_distillation",
            fix=(
                "set distill.features: null, or begin a new run with its weights: "
                "model.pretrained=PATH"
            ),
        )
    for entry, array in own.items():
        name, _, key = entry.partition("/")
        there = groups[name]
        if there is not None:  # there may be no average
            groups[name] = there | {key: array}
    return groups


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
