"""The verdict on a training in plain words: its rules and thresholds.

    level      not evaluated, not learned, partly learned, learned
    course     over-fitting, fell, still rising, no improvement
    classes    those far below the others
    trust      few images, images that could not be read
    end        why it ended before its last step

The last lines of a training, its report and `ppdist report` print the same sentences.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeGuard

from ppdist.config.evaluate import METRIC_TEXTS
from ppdist.metrics.findings import (
    BEYOND_QUERIES,
    DETR_FROM_SCRATCH,
    FEWEST,
    TINY_OBJECTS,
    Finding,
    over_fitting,
)
from ppdist.metrics.run import Run
from ppdist.metrics.scored import left_out_line

# Limits of mAP50, or of a classifier's accuracy above chance: below the first the model has not
# learned; at the second or above, it has.  Published detectors of COCO have 0.46 (YOLOv5n) and
# more.
_LEARNED_NOTHING, _LEARNED = 0.1, 0.4
_SMOOTH = 3  # window of the running median used to detect a drop
_FALL = 0.03  # a larger fall of the score than this, or than the next number times its best, counts
_FALL_OF_BEST = 0.07
_LATE = 0.25  # last part of the evaluations; its gain shows whether more epochs would help
_GAIN, _GAIN_OF_BEST = 0.01, 0.02  # smallest gain that counts: absolute, relative to the best
_EARLY = 0.6  # a best score before this part of the run means no improvement for long
_WEAK = 0.5  # a class below this part of the mean AP is weak
_MOST_WEAK = 3  # weak classes that a message names
_FEW_IMAGES = 20  # a validation split below this size scores imprecisely
# Findings before training that more epochs cannot fix.
NOT_BY_EPOCHS = (DETR_FROM_SCRATCH, TINY_OBJECTS, BEYOND_QUERIES)


class _Course(NamedTuple):
    """The score of a run at each of its evaluations."""

    metric: str
    records: Sequence[Mapping[str, Any]]
    best_record: Mapping[str, Any] | None = None  # of checkpoints/best

    @property
    def values(self) -> list[float]:
        return [float(record[self.metric]) for record in self.records]

    @property
    def best(self) -> int:
        """Returns the position of checkpoints/best.

        If there is none: that of the best score, in a tie the first.
        """
        if self.best_record in self.records:
            return self.records.index(self.best_record)
        return max(range(len(self.records)), key=lambda index: self.values[index])

    def epoch(self, index: int) -> str:
        """Returns text like `epoch 12`; "" if the epoch is not recorded."""
        epoch = self.records[index].get("epoch")
        return f"epoch {math.ceil(epoch - 1e-6)}" if _is_number(epoch) else ""


def verdict(
    evaluations: Sequence[Mapping[str, Any]],
    *,
    steps: Sequence[Mapping[str, Any]] = (),
    evaluation: Mapping[str, Any] | None = None,
    fine_tuned: bool = False,
    finished: str = "total",
    run: str = "RUN",
    findings: Mapping[str, str] | None = None,
    best: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Judges a training run; the most important finding comes first.

    Args:
        evaluations, steps: records of metrics.jsonl, in order; for an evaluation without training,
            its metrics.
        evaluation: content of evaluation.json, or parts of it.
        fine_tuned: True if the run began with trained weights.
        finished: why the run ended, as in metrics.jsonl: total, early_stopping, hours or signal;
            "" if it has not ended.
        run: the run's folder, used in commands that the user can copy.
        findings: findings before the run began, by code (`Run.findings`).
        best: the entry of `evaluations` whose weights are checkpoints/best; None: chosen by mAP or
            top1.
    """
    evaluation = evaluation or {}
    metric = "mAP" if any(_measured(record, "mAP") for record in evaluations) else "top1"
    course = _Course(metric, [record for record in evaluations if _measured(record, metric)], best)
    ended = [Finding(f"ended_by_{finished}", _ENDS[finished])] if finished in _ENDS else []
    if not course.records:
        message = (
            f"not evaluated, so nothing is known about its quality: run `ppdist eval -w {run}`"
        )
        return [Finding("not_evaluated", message), *ended]
    causes = [
        Finding(code, text) for code, text in (findings or {}).items() if code in NOT_BY_EPOCHS
    ]
    level = _level(course, evaluation, fine_tuned, causes)
    # Causes explain a failure; a model that has learned needs no excuse.
    if level.code == "learned":
        causes = []
    return [
        level,
        *causes,
        *(
            finding
            for finding in _judge_course(course, evaluations, steps)
            if not causes or finding.code != "still_rising"
        ),
        *_weak_classes(course, evaluation),
        *_trust(evaluation),
        *ended,
    ]


def judge_run(run: Run) -> list[Finding]:
    """Judges a run by its files."""
    return verdict(
        run.measured,
        steps=run.train,
        evaluation=run.evaluation,
        fine_tuned=run.config.get("model.pretrained") is not None,
        finished=run.finished,
        run=f"{run.folder}",
        findings=run.findings,
        best=run.best,
    )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _measured(record: Mapping[str, Any], metric: str) -> bool:
    return _is_number(record.get(metric)) and record[metric] >= 0


# How much was learned.


def _level(
    course: _Course,
    evaluation: Mapping[str, Any],
    fine_tuned: bool,
    causes: Sequence[Finding],
) -> Finding:
    """Describes how much the model has learned.

    Args: causes: findings that keep it from learning, which the caller lists as well.
    """
    best = course.records[course.best]
    skill = _skill(best, course.metric, evaluation)
    names = ("mAP", "mAP50") if course.metric == "mAP" else ("top1",)
    score = ", ".join(f"{name} {best[name]:.3f}" for name in names if _measured(best, name))
    best_epoch, last_epoch = course.epoch(course.best), course.epoch(len(course.records) - 1)
    if skill < _LEARNED_NOTHING:
        epochs = last_epoch.removeprefix("epoch ")
        after = f" after {epochs} {_plural(int(epochs), 'epochs')}" if last_epoch else ""
        advice = "train longer, or start from pretrained weights (--weights)"
        if fine_tuned:
            # Trained weights that do not improve point at labels or learning rate, not at too few
            # epochs.
            is_flat = len(course.records) >= FEWEST and not _gain(course)
            label_advice = "check the labels (`ppdist data show`) and try another optimizer.lr"
            advice = label_advice if is_flat else "train longer"
        if causes:
            advice = "more epochs are not the remedy"
        return Finding("not_learned", f"not learned yet: {score}{after}; {advice}")
    location = f" ({best_epoch})" if best_epoch else ""
    if skill < _LEARNED:
        return Finding("partly_learned", f"partly learned: {score}{location}")
    return Finding("learned", f"learned: {score}{location}")


def _skill(best: Mapping[str, Any], metric: str, evaluation: Mapping[str, Any]) -> float:
    """Returns the skill of a model, from 0 (nothing learned) to 1 (perfect)."""
    if metric == "mAP":
        return float(best["mAP50"] if _measured(best, "mAP50") else best["mAP"])
    classes = len(evaluation.get("per_class") or ())
    chance = 1 / classes if classes else 0.0
    return (float(best["top1"]) - chance) / max(1e-9, 1 - chance)


# How the score developed.


def _judge_course(
    course: _Course, evaluations: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> Iterator[Finding]:
    """Yields at most one of over-fitting, fell, rising and steady."""
    pairs = loss_pairs(evaluations, steps)
    over_fit = over_fitting([(train, val) for train, val, _ in pairs])
    values, name = course.values, METRIC_TEXTS.get(course.metric, course.metric)
    score, best_epoch = f"{name} {values[course.best]:.3f}", course.epoch(course.best)
    if over_fit is not None:
        epoch = pairs[over_fit.lowest][2]
        yield Finding(
            "over_fitting",
            f"over-fitting from epoch {epoch} on: the validation loss rises from "
            f"{over_fit.val_then:.3g} to {over_fit.val_now:.3g} while the training loss falls; "
            f"best: {score} ({best_epoch}); use more images, stronger data.augment or a smaller "
            "model",
        )
    elif (fall := _final_after_fall(values)) is not None:
        text = f"{score} in {best_epoch} fell to {fall:.3f} by the end; use checkpoints/best"
        yield Finding("fell", text)
    elif (gain := _gain(course)) > 0:
        yield Finding(
            "still_rising",
            f"still rising: {name} +{gain:.3f} in the last quarter; more epochs would help",
        )
    elif len(values) >= FEWEST and (1 + course.best) < _EARLY * len(values):
        since = f"no improvement since {course.epoch(course.best)}"
        yield Finding("steady", f"{since}: {name} {values[-1]:.3f} at the end")


def _final_after_fall(values: Sequence[float]) -> float | None:
    """Returns the score at the end if it fell, else None."""
    if len(values) < FEWEST:
        return None
    smooth = [median(values[start : start + _SMOOTH]) for start in range(len(values) - _SMOOTH + 1)]
    tolerance = max(_FALL, _FALL_OF_BEST * max(smooth))
    return smooth[-1] if max(smooth) - smooth[-1] > tolerance else None


def _gain(course: _Course) -> float:
    """Returns the gain in score over the last part of the evaluations."""
    values = course.values
    late_count = max(1, round(_LATE * len(values)))
    if len(values) <= late_count:
        return 0.0
    gain = max(values[-late_count:]) - max(values[:-late_count])
    return gain if gain >= max(_GAIN, _GAIN_OF_BEST * max(values)) else 0.0


def loss_pairs(
    evaluations: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> list[tuple[float, float, int]]:
    """Pairs (training loss, validation loss, epoch) of each evaluation that has both losses."""
    pairs, last_step = [], -math.inf
    steps = [step for step in steps if _is_number(step.get("step"))]  # a file may be torn
    for record in (entry for entry in evaluations if _is_number(entry.get("step"))):
        losses = [
            step["loss"]
            for step in steps
            if last_step < step["step"] <= record["step"] and _is_number(step.get("loss"))
        ]
        if losses and _is_number(record.get("val_loss")):
            epoch = math.ceil(record.get("epoch", 0) - 1e-6)
            pairs.append((sum(losses) / len(losses), record["val_loss"], epoch))
            last_step = record["step"]
    return pairs


# Classes.


def _weak_classes(course: _Course, evaluation: Mapping[str, Any]) -> Iterator[Finding]:
    if _skill(course.records[course.best], course.metric, evaluation) < _LEARNED_NOTHING:
        return
    key, count = ("AP", "objects") if course.metric == "mAP" else ("top1", "images")
    rows = [row for row in evaluation.get("per_class") or () if _measured(row, key)]
    mean = sum(row[key] for row in rows) / max(1, len(rows))
    weak = sorted((row for row in rows if row[key] < _WEAK * mean), key=lambda row: row[key])
    if not weak:
        return
    class_texts = ", ".join(
        f"{row.get('name')} ({key} {row[key]:.2f}, {row.get(count)} "
        f"{_plural(row.get(count), count)})"
        for row in weak[:_MOST_WEAK]
    )
    remainder = f" and {len(weak) - _MOST_WEAK} more" if len(weak) > _MOST_WEAK else ""
    heading = "a weak class" if len(weak) == 1 else "weak classes"
    yield Finding("weak_classes", f"{heading}: {class_texts}{remainder}; the mean is {mean:.2f}")


def _plural(count: object, noun: str) -> str:
    return noun.removesuffix("s") if count == 1 else noun


# Trust and end.


def _trust(evaluation: Mapping[str, Any]) -> Iterator[Finding]:
    if left_out := left_out_line(evaluation):
        yield Finding("left_out", left_out)
    images = evaluation.get("images")
    if images and images < _FEW_IMAGES:
        noun = _plural(images, "images")
        yield Finding("few_images", f"measured on only {images} {noun}: the score is imprecise")


_ENDS = {
    "early_stopping": "stopped early: no improvement for too long (early_stopping)",
    "hours": "train.hours ran out before the last step; --resume continues",
    "signal": "stopped by a signal before the last step; --resume continues",
}
