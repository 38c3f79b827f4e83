"""What the commands make of a stored run, of the version that made it and of this one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEST = 12  # detections that are stored
VALIDATION = {"classifier": "patterns/val"}  # others: shapes
ALL = ("-o", "nms.score_threshold=0.0001")  # they have learned little


def outcomes(name: str, command: Callable[..., None]) -> dict[str, Any]:
    """Detections, metrics, those of an export, and losses of one more epoch.

    Args:
        name: of the run, a folder in the current one, beside its data.
        command: runs `ppdist` with these words.
    """
    source = VALIDATION.get(name, "shapes/images/val")
    more = () if name in VALIDATION else ALL
    command("eval", "-w", name, *more, "--json", f"{name}_metrics.json")
    command("export", "-w", name, *more, "--out", f"{name}_exported")
    return {
        "detections": detections(command, ("-w", name, *more), source),
        "exported": detections(command, ("--model", f"{name}_exported"), source),
        "metrics": json.loads(Path(f"{name}_metrics.json").read_text(encoding="utf-8")),
        "losses": resumed_losses(command, name),
    }


def detections(command: Callable[..., None], model: tuple[str, ...], source: str) -> list[Any]:
    """All rows, the surest first: [image, class, score, box]; of a classifier without the box."""
    out = Path(f"{model[1]}_{model[0].strip('-')}")
    threshold = () if source.startswith("patterns") else ("--threshold", 0.0001)
    command("predict", *model, "--source", source, "--out", out, "--no-pictures", *threshold)
    if (out / "classes.json").is_file():
        content = json.loads((out / "classes.json").read_text(encoding="utf-8"))
        rows = [
            [image["file_name"], best["name"], best["score"]]
            for image in content["images"]
            for best in image["best"]
        ]
    else:
        content = json.loads((out / "detections.json").read_text(encoding="utf-8"))
        names = {image["id"]: Path(image["file_name"]).name for image in content["images"]}
        rows = [
            [names[one["image_id"]], one["category_id"], one["score"], one["bbox"]]
            for one in content["annotations"]
        ]
    return sorted(rows, key=lambda row: -row[2])


def resumed_losses(command: Callable[..., None], name: str) -> list[float]:
    """Losses of the steps of one more epoch."""
    records = Path(name, "metrics.jsonl")
    before = len(records.read_text(encoding="utf-8").splitlines())
    command("train", "--resume", name, "--epochs", "+1", "-o", "log.every_steps=1")
    lines = map(json.loads, records.read_text(encoding="utf-8").splitlines()[before:])
    return [line["loss"] for line in lines if "loss" in line and "step" in line]
