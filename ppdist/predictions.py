"""What a model found in images and videos: a JSON file, and every picture with it drawn.

report = Objects(out, spec, predict, threshold, warn)  or  Classes(out, spec, predict, warn)
report.look_at(file, name, picture) of each file, then report.write()
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ppdist.classification import Classifier, best_classes_of
from ppdist.drawing import draw_boxes, draw_classes
from ppdist.errors import ConfigError
from ppdist.files import write_json
from ppdist.infer_spec import InferenceSpec
from ppdist.inference import Predictor, detect
from ppdist.metrics.classification import best_classes
from ppdist.pictures import Frame, PictureWriter, frames_of


class Report:
    """What was found so far.

    Attributes:
        images: of the JSON file.
        unreadable: how many files could not be read.
    """

    file_name: str

    def __init__(self, out: Path, spec: InferenceSpec, warn: Callable[[str], None]) -> None:
        """Args: out: where the JSON file and the pictures go; warn: told of unreadable files."""
        self.out, self.spec = out, spec
        self.images: list[dict[str, Any]] = []
        self.unreadable = 0
        self._warn = warn

    def look_at(self, file: Path, name: str, picture: str) -> str:
        """Predicts one image or every frame of a video, and writes it with what was found.

        Args:
            name: of the file, in the JSON.
            picture: of what is written, below `out`.
        Returns: what was found, in a few words; nothing where the file could not be read.
        """
        before = len(self.images)
        with PictureWriter(file, self.out / picture) as writer:
            for frame in frames_of(file, name, self._complain):
                height, width = frame.image_HW3.shape[:2]
                image: dict[str, Any] = {"id": len(self.images) + 1, "file_name": frame.name}
                if frame.index is not None:
                    image["frame"] = frame.index
                self.images.append({**image, "width": width, "height": height})
                writer.write(self._found_in(frame, self.images[-1]))
        return self._said_of(self.images[before:]) if len(self.images) > before else ""

    def write(self) -> Path:
        """Writes the JSON file.  Raises: UserError: it cannot be written."""
        write_json(self.out / self.file_name, self.content())
        return self.out / self.file_name

    def total(self) -> str:
        """What was found in all, in a few words."""
        raise NotImplementedError

    def content(self) -> dict[str, Any]:
        """Of the JSON file."""
        pairs = zip(self.spec.category_ids, self.spec.class_names)
        categories = [{"id": number, "name": name} for number, name in pairs]
        return {"images": self.images, "categories": categories}

    def _found_in(self, frame: Frame, image: dict[str, Any]) -> np.ndarray:
        """Notes what the model finds, in `image` or beside it; returns the frame with it drawn."""
        raise NotImplementedError

    def _said_of(self, images: list[dict[str, Any]]) -> str:
        """What was found in one image, or in all frames of a video, in a few words."""
        raise NotImplementedError

    def _complain(self, reason: str) -> None:
        self.unreadable += 1
        self._warn(f"{reason}; skipped")


class Objects(Report):
    """Of a detector; boxes whose score is below the threshold do not count."""

    file_name = "detections.json"

    def __init__(
        self,
        out: Path,
        spec: InferenceSpec,
        predict: Predictor,
        threshold: float,
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(out, spec, warn)
        self._predict, self._threshold = predict, threshold
        self._annotations: list[dict[str, Any]] = []

    def total(self) -> str:
        return f"{len(self._annotations)} objects in {len(self.images)} images"

    def content(self) -> dict[str, Any]:
        return {**super().content(), "annotations": self._annotations}

    def _found_in(self, frame: Frame, image: dict[str, Any]) -> np.ndarray:
        size, mode = self.spec.input.size, self.spec.resize.mode
        assert mode != "centre_crop"  # of classifiers
        rows_R6 = detect(self._predict, frame.image_HW3, size, mode)
        rows_R6 = rows_R6[rows_R6[:, 1] >= self._threshold]
        for label, score, x1, y1, x2, y2 in rows_R6.tolist():
            self._annotations.append(
                {
                    "id": len(self._annotations) + 1,
                    "image_id": image["id"],
                    "category_id": self.spec.category_ids[int(label)],
                    "bbox": [round(value, 2) for value in (x1, y1, x2 - x1, y2 - y1)],
                    "area": round((x2 - x1) * (y2 - y1), 2),
                    "iscrowd": 0,
                    "score": round(score, 5),
                }
            )
        labels_R, names = rows_R6[:, 0].astype(int), self.spec.class_names
        return draw_boxes(frame.image_HW3, rows_R6[:, 2:], labels_R, names, rows_R6[:, 1])

    def _said_of(self, images: list[dict[str, Any]]) -> str:
        ids = {image["id"] for image in images}
        objects = sum(entry["image_id"] in ids for entry in self._annotations)
        return f"{objects} objects" + (f" in {len(images)} frames" if len(images) > 1 else "")


class Classes(Report):
    """Of a classifier."""

    file_name = "classes.json"

    def __init__(
        self, out: Path, spec: InferenceSpec, predict: Classifier, warn: Callable[[str], None]
    ) -> None:
        super().__init__(out, spec, warn)
        self._predict = predict

    def total(self) -> str:
        return f"the class of {len(self.images)} images"

    def _found_in(self, frame: Frame, image: dict[str, Any]) -> np.ndarray:
        names = self.spec.class_names
        labels_K, scores_K = best_classes_of(self._predict, frame.image_HW3, self.spec.input.size)
        image["best"] = best_classes(labels_K, scores_K, names)
        return draw_classes(frame.image_HW3, labels_K, names, scores_K)

    def _said_of(self, images: list[dict[str, Any]]) -> str:
        if len(images) == 1:
            return ", ".join(f"{kind['name']} {kind['score']:.2f}" for kind in images[0]["best"])
        first = Counter(image["best"][0]["name"] for image in images)
        counted = ", ".join(f"{name} in {count}" for name, count in first.most_common(5))
        return f"of {len(images)} frames {counted}"


def require_own_folder(out: Path, source: Path) -> None:
    """Raises: ConfigError: pictures written to `out` would replace those of `source`, or those
    already in it would pass for results and not be looked at."""
    folder = (source if source.is_dir() else source.parent).resolve()
    above = folder.parents if source.is_dir() else ()
    if out.resolve() in (folder, *above):
        raise ConfigError(
            "the pictures of --source are there, or below, and could be overwritten",
            code="out_holds_source",
            where=f"--out {out}",
            fix="choose another folder",
        )
    inside = source.is_dir() and source.resolve() in out.resolve().parents
    ours = any((out / kind.file_name).is_file() for kind in (Objects, Classes))
    if inside and not ours and out.is_dir() and any(out.iterdir()):
        raise ConfigError(
            "lies in --source and holds files that are no results of this tool",
            code="out_not_ours",
            where=f"--out {out}",
            fix="choose another folder, or empty it",
        )
