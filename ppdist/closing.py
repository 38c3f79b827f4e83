"""What stands under a run that has ended: how it went, where everything is, where the time went."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppdist.run_records import RunRecords, read_metrics
from ppdist.time_left import duration

_SHOWN = ("mAP", "mAP50", "top1", "top5", "precision", "recall", "f1", "val_loss")


def closing_rows(output_dir: Path, seconds: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(what, value, where or why) from what a run has left; what is not there has no row.

    Args: seconds: wall time of this process by part.
    """
    try:
        records = read_metrics(output_dir / "metrics.jsonl")
    except OSError:
        records = []
    found = RunRecords.of(records)
    evaluations = {each["step"]: each for each in found.evaluations}
    checkpoints = output_dir / "checkpoints"
    rows = []
    for name in ("best", "last"):
        step = step_of(checkpoints / name)
        if step is not None:
            scores = _scores(evaluations.get(step, {})) or f"step {step}, not evaluated"
            rows.append((name, scores, f"checkpoints/{name}"))
    if len(evaluations) > 1:
        first, *_, last = sorted(evaluations)
        rows.append(("first evaluation", _scores(evaluations[first]), f"step {first} of {last}"))
    losses = [each for each in found.steps if each["loss"] is not None]
    if losses:
        first_loss, last_loss = losses[0], losses[-1]
        change = f"from {first_loss['loss']:.4g} at step {first_loss['step']}"
        rows.append(("training loss", f"{last_loss['loss']:.4g}", change))
    rows += _places(output_dir)
    total = sum(seconds.values())
    parts = sorted(seconds.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{part} {value / max(total, 1e-9):.0%}" for part, value in parts if value)
    rows.append(("time", duration(total), shares))
    return rows


def _places(output_dir: Path) -> list[tuple[str, str, str]]:
    candidates = (
        ("plots", "plots", "curves, matrices, worst and best images"),
        ("evaluation", "evaluation.json", "tables and curves of the best"),
        ("every number", "metrics.jsonl", "one JSON object a line"),
        ("this text", "train.log", ""),
    )
    return [(what, name, how) for what, name, how in candidates if (output_dir / name).exists()]


def commands(output_dir: Path) -> list[str]:
    """What shows the run, ready to be copied."""
    found = [f"python tools/report.py {output_dir}"]
    if (output_dir / "vdl").exists():
        folder = output_dir / "vdl"
        found.append(f"visualdl --logdir {folder} --language en --disable-telemetry")
    if (output_dir / "tensorboard").exists():
        found.append(f"tensorboard --logdir {output_dir / 'tensorboard'}")
    return found


def step_of(checkpoint: Path) -> int | None:
    """The step of a checkpoint, or of one that a link names; None: it is none, or not there."""
    try:
        kind, _, step = checkpoint.resolve(strict=True).name.partition("-")
        return int(step) if kind == "step" else None
    except (OSError, ValueError):
        return None


def _scores(record: Mapping[str, Any]) -> str:
    values = [f"{name} {record[name]:.4f}" for name in _SHOWN if record.get(name) is not None]
    return "  ".join(values)
