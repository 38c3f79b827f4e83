"""Describes what a score covers: images that are left out of it, and boxes that do not count."""

from collections.abc import Mapping
from typing import Any

from ppdist.data.types import DetectionSet

_NAMED = 3  # images left out that a message names


def scored_images(dataset: DetectionSet) -> dict[str, Any]:
    """Returns `images` and `left_out` of evaluation.json."""
    left_out = [
        {"file": dataset.records[index].path, "why": dataset.unreadable[index]}
        for index in sorted(dataset.unreadable)
    ]
    return {"images": len(dataset.records) - len(left_out), "left_out": left_out}


def count_duplicates(dataset: DetectionSet) -> int:
    """Returns how many boxes of the scored images do not count because they repeat another."""
    scored = dataset.duplicates.keys() - dataset.unreadable.keys()
    return sum(dataset.duplicates[index] for index in scored)


def left_out_line(evaluation: Mapping[str, Any]) -> str:
    """Describes how many images a score leaves out, and which; "" if none.

    Args: evaluation: content of evaluation.json.
    """
    left_out = evaluation.get("left_out") or []
    if not left_out:
        return ""
    reasons = [f"{image['file']}: {image['why']}" for image in left_out[:_NAMED]]
    if len(left_out) > _NAMED:
        reasons.append(f"and {len(left_out) - _NAMED} more")
    verb = "is" if len(left_out) == 1 else "are"
    return (
        f"{len(left_out)} of {evaluation['images'] + len(left_out)} images could not be read and "
        f"{verb} left out of the score: {'; '.join(reasons)}"
    )


def duplicates_line(count: int) -> str:
    """Describes how many boxes a score does not count because they repeat another."""
    return f"{count} duplicates of boxes of the same image and class are not scored"
