"""The state of a run: everything it resumes from, captured and restored.

fit:      capture_state -> checkpoint
--resume: find_start (engine/resume.py) -> restore_state
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
from pydantic import BaseModel, Field, field_serializer, field_validator

from ppdist.common.code_digest import digest_of_package
from ppdist.common.errors import CheckpointError
from ppdist.engine.checkpoint import Snapshot
from ppdist.engine.early_stopping import EarlyStoppingState, LossCurves
from ppdist.engine.schedule_setup import ScheduleSetup
from ppdist.engine.step_sums import StepSums
from ppdist.engine.train_step import TrainStep

_LR_FACTOR = 0.5  # applied at each rollback
_DISTILLATION_PREFIX = (
    "distillation."  # key prefix of the student's sublayer used only by distillation
)
_Groups = dict[str, dict[str, np.ndarray]]


class Run(BaseModel, extra="forbid"):
    """Identity of a run, the same in all of its checkpoints."""

    id: str = ""  # drawn at its start
    images: int  # in the training set
    data: str  # fingerprint of its annotations
    pixels: str = ""  # fingerprint of its images, as far as they were checked; "" if unknown
    schedule_steps: int
    bad_images: dict[int, str] = {}  # position in the set -> why
    teacher: str | None = None  # fingerprint of its weights


class TrainState(BaseModel, populate_by_name=True):
    """The position of a run, saved in state.json of its checkpoints.

    Some fields have other names in the file (alias): renaming them there would make older
    checkpoints unreadable.
    """

    step: int = Field(default=0, ge=0)
    best: float = -math.inf  # null in JSON
    best_step: int = Field(default=0, ge=0)
    bad_steps: int = 0  # consecutive ones
    evaluated_step: int = 0
    class_scores: list[float | None] | None = None  # from the last evaluation
    best_f1_threshold: float | None = Field(default=None, ge=0, le=1)  # likewise
    run: Run | None = None  # None: the checkpoint predates run ids
    # Each rollback halves the learning rate; see `lr_factor`.
    rollbacks: int = Field(default=0, alias="returns")
    # Number of images; set once a whole micro-batch did not fit into the memory of a rank.
    max_micro_batch: int | None = Field(default=None, gt=0, alias="most_images")
    # None if not configured, or before the first evaluation.
    early_stopping: EarlyStoppingState | None = Field(default=None, alias="standing")
    losses: LossCurves = Field(default_factory=LossCurves)
    # Sums over the epoch and since the last record; None if the checkpoint predates them.
    epoch_sums: StepSums | None = None
    record_sums: StepSums | None = None

    @property
    def lr_factor(self) -> float:
        """Returns the factor of the learning rate after the rollbacks so far."""
        return _LR_FACTOR**self.rollbacks

    @field_validator("best", mode="before")
    @classmethod
    def _parse_best(cls, value: Any) -> Any:
        return -math.inf if value is None else value

    @field_serializer("best")
    def _serialize_best(self, value: float) -> float | None:
        return value if math.isfinite(value) else None

    def roll_back_to(self, earlier: "TrainState") -> None:
        """Returns to an earlier state; keeps rollbacks, micro-batch and identity."""
        for name in TrainState.model_fields.keys() - _KEPT_IN_ROLLBACK:
            setattr(self, name, getattr(earlier, name))
        self.bad_steps = 0


_KEPT_IN_ROLLBACK = {"rollbacks", "max_micro_batch", "run"}


class SavedState(TrainState):
    """state.json: a TrainState, and facts about the attempt that wrote it."""

    epoch: float | None = None
    total_batch: int = Field(gt=0)
    batch_size_per_card: int | None = Field(default=None, gt=0)
    # None in checkpoints of earlier versions, see `_add_micro_batches`.
    micro_batch: int | None = Field(default=None, gt=0)
    sync_bn: bool | None = None
    world: int = Field(gt=0)
    bucket_mb: int | None = None  # written by earlier versions
    ema_updates: int = 0
    ema_restarted: int | None = None
    scaler: dict[str, Any]
    code: str | None = None


def capture_state(step: TrainStep, state: TrainState, schedule: ScheduleSetup) -> Snapshot:
    """Copies everything that a run needs to resume.  Collective."""
    groups = {
        "model": {key: _to_numpy(value) for key, value in step.model.state_dict().items()},
        "optimizer": step.optimizer.state(),
    }
    residuals = step.exchange.state()
    if residuals:
        groups["averaging"] = residuals
    about = {
        "epoch": state.step / schedule.steps_per_epoch,
        **ingredients(schedule),
        "scaler": step.precision.state(),
        "code": digest_of_package(),
    }
    for policy in step.policies:
        arrays, facts = policy.state()
        groups |= arrays
        about |= facts
    saved = SavedState(**{**dict(state), **about}).model_dump(mode="json", by_alias=True)
    return Snapshot(state.step, _split_distillation(groups), saved)


def ingredients(schedule: ScheduleSetup) -> dict[str, Any]:
    """Returns the batch sizes of a step, which `resumed_micro_batches` compares."""
    return {
        "total_batch": schedule.total_batch,
        "batch_size_per_card": schedule.batch_size_per_card,
        "micro_batch": schedule.batches.images,
        "sync_bn": schedule.batches.spread,
        "world": schedule.world,
    }


def restore_state(saved: Snapshot, step: TrainStep) -> tuple[TrainState, str]:
    """Restores a run from a checkpoint.  Collective.

    The checkpoint must have the same total batch.
    Returns: the restored state; a warning, if something was lost or reset.
    Raises: CheckpointError: its model has different shapes, or the checkpoint is incomplete.
    """
    state = saved.state
    adapters = getattr(step.model, "distillation", None)
    # If all adapters are identities, they learn nothing, and checkpoints have no group for them.
    groups = _merge_distillation(saved, adapters is not None and bool(adapters.parameters()))
    arrays = groups["model"] or {}
    model_shapes = {key: list(value.shape) for key, value in step.model.state_dict().items()}
    saved_shapes = {key: list(value.shape) for key, value in arrays.items()}
    if model_shapes != saved_shapes:
        differing_keys = sorted(
            key
            for key in model_shapes | saved_shapes
            if model_shapes.get(key) != saved_shapes.get(key)
        )
        raise CheckpointError(
            f"the checkpoint does not fit this model: {differing_keys[0]} has shape "
            f"{saved_shapes.get(differing_keys[0], 'absent')} there and "
            f"{model_shapes.get(differing_keys[0], 'absent')} here",
            code="checkpoint_of_other_config",
            fix="resume with the configuration the run was started with",
        )
    optimizer_state = groups["optimizer"]
    if optimizer_state is None:
        raise CheckpointError(
            f"the checkpoint of step {state['step']} has no optimizer.safetensors, so the run "
            "cannot resume",
            code="checkpoint_without_optimizer",
            fix="start a new run with its weights: model.pretrained=PATH",
        )
    copy_into(step.model.state_dict(), arrays)
    optimizer_warning = step.optimizer.load(optimizer_state)
    residual_warning = step.exchange.load(saved.groups.get("averaging") or {})
    for policy in step.policies:
        policy.load(groups, state)
    step.precision.load(state["scaler"])
    # The restored statistics are equal on all ranks, so no micro-batches are left to average.
    step.statistics.forget()
    # Older versions did not record evaluations; without this, an evaluation would be repeated.
    restored = SavedState.model_validate({"evaluated_step": saved.step} | state)
    return restored, "; ".join(filter(None, [optimizer_warning, residual_warning]))


def _split_distillation(groups: _Groups) -> _Groups:
    """Moves arrays used only by distillation into their own group, as `<group>/<key>`.

    The other groups are then the same as for a model without a teacher.
    """
    adapter_arrays: dict[str, np.ndarray] = {}
    student_groups: _Groups = {}
    for name in ("model", "optimizer", "ema"):
        for key, array in groups.get(name, {}).items():
            if key.startswith(_DISTILLATION_PREFIX):
                adapter_arrays[f"{name}/{key}"] = array
            else:
                student_groups.setdefault(name, {})[key] = array
    return groups | student_groups | ({"distillation": adapter_arrays} if adapter_arrays else {})


def _merge_distillation(saved: Snapshot, adapts: bool) -> dict[str, dict[str, np.ndarray] | None]:
    """Undoes `_split_distillation`; without a teacher, omits its group.

    Args: adapts: whether the model has adapters that learn.
    Raises: CheckpointError: the checkpoint lacks the adapters of the current teacher.
    """
    groups = {name: saved.groups.get(name) for name in ("model", "optimizer", "ema")}
    if not adapts:
        return groups
    adapter_arrays = saved.groups.get("distillation")
    if adapter_arrays is None:
        raise CheckpointError(
            f"the checkpoint of step {saved.state['step']} was trained without distill.features: "
            "it has no distillation.safetensors",
            code="checkpoint_without_distillation",
            fix=(
                "set distill.features: null, or start a new run with its weights: "
                "model.pretrained=PATH"
            ),
        )
    for entry, array in adapter_arrays.items():
        name, _, key = entry.partition("/")
        group = groups[name]
        if group is not None:  # there may be no EMA
            groups[name] = group | {key: array}
    return groups


def copy_into(targets: dict[str, paddle.Tensor], sources: Mapping[str, Any]) -> None:
    """Overwrites tensors with the arrays or tensors under the same keys; keeps dtypes."""
    for key, target in targets.items():
        source = sources[key]
        if not isinstance(source, paddle.Tensor):
            source = paddle.to_tensor(source)
        paddle.assign(source.astype(target.dtype), target)


def _to_numpy(tensor: paddle.Tensor) -> np.ndarray:
    """Converts to numpy; low precision becomes float32, as numpy has no bfloat16."""
    is_low_precision = tensor.dtype in (paddle.float16, paddle.bfloat16)
    return (tensor.astype("float32") if is_low_precision else tensor).numpy()
