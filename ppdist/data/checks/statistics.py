"""Statistics of a split, and anchors that fit its boxes.

    DetectionSet -> Objects (one row per object) -> summary (numbers, for JSON) -> overview (text)
                                                -> ppdist/viz/plots.py
    boxes in input pixels -> best possible recall of anchors -> k-means, genetic refinement

The distance of two sizes [width, height] is the ratio of their sides.

Letters: N images or boxes, M objects of all images together, C classes, L levels, A anchors per
level, K = L * A.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ppdist.common.errors import DataError
from ppdist.config.data import Resize
from ppdist.config.evaluate import COCO_DETECTIONS
from ppdist.data.transforms.geometry import fit_image
from ppdist.data.types import DetectionSet, Records

_SMALL, _LARGE = 32**2, 96**2  # square pixels, COCO's limits
_FINE = 8.0  # input pixels, the finest stride of the detectors here
_PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
_MOST_SIZES = 20
_BORDER = 1.0  # pixels


def describe_crowding(dataset: DetectionSet, max_detections: int, keep: int) -> list[str]:
    """Describes images with more objects than can be detected or counted, a line per problem.

    Args:
        max_detections: see `evaluate.max_detections`.
        keep: number of boxes per image that suppression keeps; see `ExperimentConfig.suppression`.
    """
    records = Records.of(dataset.records)
    image_O = records.image_O[~records.crowd_O]
    classes = max(1, len(dataset.class_names))
    of_class, count_P = np.unique(
        image_O * classes + records.labels_O[~records.crowd_O], return_counts=True
    )
    many_P = count_P > max_detections
    count_N = np.bincount(image_O, minlength=len(records))
    lines, needed = [], keep
    if many_P.any():
        highest, images = int(count_P.max()), len(np.unique(of_class[many_P] // classes))
        coco_note = (
            ", as in COCO, so mAP cannot reach 1" if max_detections == COCO_DETECTIONS else ""
        )
        needed = -(-highest // 100) * 100
        lines.append(
            f"{dataset.source}: {images} of {len(records)} images show more than {max_detections} "
            f"objects of one class, up to {highest}: only {max_detections} detections per class "
            f"and image count{coco_note}; to count all, set evaluate.max_detections: {needed}"
        )
    if (count_N > max(keep, needed)).any():  # nms.keep follows evaluate.max_detections
        lines.append(
            f"{dataset.source}: {(count_N > keep).sum()} of {len(records)} images show more than "
            f"{keep} objects, up to {count_N.max()}, but only {keep} boxes per image are kept; to "
            f"keep all, set nms.keep: {-(-count_N.max() // 100) * 100}"
        )
    if max_detections > COCO_DETECTIONS:
        lines.append(
            f"evaluate.max_detections: {max_detections}: mAP counts up to {max_detections} "
            f"detections per class and image; COCO and published figures count {COCO_DETECTIONS}"
        )
    return lines


@dataclass(frozen=True)
class Objects:
    """The objects of a split, in columns of one row per object, and its images.

    image_M: int64 position of the image; labels_M int64 in [0, C); crowd_M bool.
    boxes_M4: float64 xyxy, pixels of the original; area_M: square pixels of the original.
    input_M2: float64 width and height in pixels of the input.
    sizes_N2: int64 width and height of each image in pixels; 0 if unknown.
    """

    image_M: np.ndarray
    labels_M: np.ndarray
    crowd_M: np.ndarray
    boxes_M4: np.ndarray
    area_M: np.ndarray
    input_M2: np.ndarray
    sizes_N2: np.ndarray

    @property
    def per_image_N(self) -> np.ndarray:
        """Counts the objects of each image, crowds included."""
        return np.bincount(self.image_M, minlength=len(self.sizes_N2))

    @property
    def centres_M2(self) -> np.ndarray:
        """Returns the centres of the boxes, x y, as shares of their image."""
        middle_M2 = (self.boxes_M4[:, :2] + self.boxes_M4[:, 2:]) / 2
        return middle_M2 / np.maximum(self.sizes_N2[self.image_M], 1)

    @property
    def shapes_M(self) -> np.ndarray:
        """Returns width / height of the boxes, as in the original."""
        sides_M2 = self.boxes_M4[:, 2:] - self.boxes_M4[:, :2]
        return sides_M2[:, 0] / np.maximum(sides_M2[:, 1], 1e-9)


def collect_objects(dataset: DetectionSet, image_size: tuple[int, int], resize: Resize) -> Objects:
    """Collects the objects of a split, in the order of its images.

    Args:
        image_size: (height, width) of the input in pixels.
        resize: `data.resize`.
    """
    records = Records.of(dataset.records)
    boxes_M4 = records.boxes_O4.astype(np.float64)
    image_M = records.image_O
    scale_N2 = _input_scales(records, image_size, resize)
    return Objects(
        image_M=image_M,
        labels_M=records.labels_O,
        crowd_M=records.crowd_O,
        boxes_M4=boxes_M4,
        area_M=records.area_O.astype(np.float64),
        input_M2=(boxes_M4[:, 2:] - boxes_M4[:, :2]) * scale_N2[image_M],
        sizes_N2=records.sizes_N2[:, ::-1],
    )


def _input_scales(records: Records, image_size: tuple[int, int], resize: Resize) -> np.ndarray:
    """Computes input pixels per original pixel, float64 [N, 2], x y; 1 if the size is unknown."""
    scale_N2 = np.ones((len(records), 2))
    for index, (height, width) in enumerate(records.sizes_N2.tolist()):
        if width:
            scale_N2[index] = fit_image(width, height, image_size, resize).scale[::-1]
    return scale_N2


def count_per_class(objects: Objects, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts objects [C] and images [C] of each of `count` classes, without crowds."""
    alone_M = ~objects.crowd_M
    labels, images = objects.labels_M[alone_M], objects.image_M[alone_M]
    pairs = np.unique(np.stack([images, labels]), axis=1)
    return np.bincount(labels, minlength=count), np.bincount(pairs[1], minlength=count)


def summarize(dataset: DetectionSet, objects: Objects, *, boxes: bool = True) -> dict[str, Any]:
    """Summarizes a split in numbers, as JSON can hold them.

    Args:
        boxes: False for classified images, whose one object has no box.
    """
    counts: dict[str, Any] = {
        "source": dataset.source,
        "images": len(dataset.records),
        "classes": _class_table(dataset, objects, boxes),
        "notes": [note.removeprefix(f"{dataset.source}: ") for note in dataset.notes],
        "limited": dataset.limited or None,
    }
    return (
        {**counts, **_summarize_images(objects), **_summarize_boxes(objects)} if boxes else counts
    )


def _class_table(dataset: DetectionSet, objects: Objects, boxes: bool) -> list[dict[str, Any]]:
    names, alone_M = dataset.class_names, ~objects.crowd_M
    counts_C, images_C = count_per_class(objects, len(names))
    side_M = np.sqrt(objects.input_M2.prod(1))
    rows = []
    for label, (number, name) in enumerate(zip(dataset.category_ids, names)):
        row = {"id": number, "name": name, "images": int(images_C[label])}
        if boxes:
            of_class_M = alone_M & (objects.labels_M == label)
            middle = float(np.median(side_M[of_class_M])) if of_class_M.any() else None
            row |= {"objects": int(counts_C[label]), "median_side_in_input": middle}
        rows.append(row)
    return rows


def _summarize_images(objects: Objects) -> dict[str, Any]:
    common = Counter(map(tuple, objects.sizes_N2.tolist())).most_common()
    per_image_N = objects.per_image_N
    return {
        "image_sizes": [[*size, count] for size, count in common[:_MOST_SIZES]],
        "images_of_other_sizes": sum(count for _, count in common[_MOST_SIZES:]),
        "images_without_objects": int((per_image_N == 0).sum()),
        "objects_per_image": {"mean": float(per_image_N.mean())} | _percentiles(per_image_N),
        "most_objects_in_an_image": int(per_image_N.max()),
    }


def _summarize_boxes(objects: Objects) -> dict[str, Any]:
    alone_M = ~objects.crowd_M
    area_M, input_M2 = objects.area_M[alone_M], objects.input_M2[alone_M]
    boxes_M4, size_M2 = objects.boxes_M4[alone_M], objects.sizes_N2[objects.image_M[alone_M]]
    at_border_M = (boxes_M4[:, :2] < _BORDER) | (boxes_M4[:, 2:] > size_M2 - _BORDER)
    centres_M2 = objects.centres_M2[alone_M]
    ninths, _, _ = np.histogram2d(
        centres_M2[:, 1], centres_M2[:, 0], bins=3, range=((0, 1), (0, 1))
    )
    small, large = int((area_M < _SMALL).sum()), int((area_M >= _LARGE).sum())
    return {
        "objects": len(area_M),
        "crowds": int(objects.crowd_M.sum()),
        "small_medium_large": [small, len(area_M) - small - large, large],
        "side_in_input": _percentiles(np.sqrt(input_M2.prod(1))),
        "shorter_side_in_input_below_8": int((input_M2.min(1, initial=np.inf) < _FINE).sum()),
        "width_by_height": _percentiles(objects.shapes_M[alone_M]),
        "at_the_border": int(at_border_M.any(1).sum()),
        "centres_in_ninths": ninths.astype(int).tolist(),
    }


def _percentiles(values: np.ndarray) -> dict[str, float]:
    """Returns percentiles as keys `p1` to `p99`; {} without values."""
    if not len(values):
        return {}
    percentiles = np.percentile(values, _PERCENTILES).tolist()
    return {f"p{part}": value for part, value in zip(_PERCENTILES, percentiles)}


def overview_lines(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Describes a split in (label, value) lines, from its `summarize`.

    The classes have a table of their own.  All splits of a set get the same number of lines, so
    that they can be printed side by side.
    """
    rows = [("images", f"{counts['images']}")]
    if "objects" not in counts:
        return [
            *rows,
            ("classes", _spread_text([row["images"] for row in counts["classes"]], "images")),
        ]
    sizes = [f"{width}x{height} ({count})" for width, height, count in counts["image_sizes"][:3]]
    other_sizes = counts["images"] - sum(count for _, _, count in counts["image_sizes"][:3])
    per_image, objects = counts["objects_per_image"], counts["objects"]
    fine = counts["shorter_side_in_input_below_8"]
    return [
        *rows,
        ("  sizes", ", ".join([*sizes, f"others ({other_sizes})"] if other_sizes else sizes)),
        ("  without an object", _share_text(counts["images_without_objects"], counts["images"])),
        (
            "  objects in one",
            f"mean {per_image['mean']:.1f}, median {per_image['p50']:g}, 95 % up to "
            f"{per_image['p95']:.0f}, most {counts['most_objects_in_an_image']}",
        ),
        ("objects", f"{objects}"),
        ("  small / medium / large", " / ".join(map(str, counts["small_medium_large"]))),
        ("  side in the input, px", _middle_text(counts["side_in_input"])),
        ("  shorter side below 8 px there", _share_text(fine, objects)),
        ("  width / height", _middle_text(counts["width_by_height"])),
        ("  at the border", _share_text(counts["at_the_border"], objects)),
        ("  centres, % of 3 x 3 fields", _ninths_text(counts["centres_in_ninths"], objects)),
        ("  crowds, not learned", f"{counts['crowds']}"),
        ("classes", _spread_text([row["objects"] for row in counts["classes"]], "objects")),
        ("defects", "\n".join(counts["notes"]) or "none put right while reading"),
    ]


def class_rows(of_splits: Sequence[Mapping[str, Any]], limit: int) -> list[list[str]]:
    """Builds a row for each class: id, name, objects and images per split.

    Rows are in the order of the class numbers.  If there are more than `limit` classes, returns the
    most common and the rarest ones in the first split, with a row of dots between them.

    Args: of_splits: `summarize` of each split.
    """
    rows = []
    for entries in zip(*(counts["classes"] for counts in of_splits)):
        numbers = [entry[key] for entry in entries for key in ("objects", "images") if key in entry]
        rows.append((numbers[0], [str(entries[0]["id"]), entries[0]["name"], *map(str, numbers)]))
    if len(rows) <= limit:
        return [row for _, row in rows]
    ordered = [row for _, row in sorted(rows, key=lambda pair: -pair[0])]
    return [*ordered[: limit // 2], ["..."] * len(ordered[0]), *ordered[-(limit // 2) :]]


def _spread_text(counts: Sequence[int], of: str) -> str:
    if not counts:
        return "0"
    middle = float(np.median(counts))
    return f"{len(counts)} (of {min(counts)} to {max(counts)} {of}, median {middle:g})"


def _share_text(count: int, total: int) -> str:
    return f"{count} ({count / total:.1%})" if total else f"{count}"


def _middle_text(percentiles: Mapping[str, float]) -> str:
    if not percentiles:
        return "-"
    low, middle, high = (percentiles[part] for part in ("p5", "p50", "p95"))
    return f"median {middle:.3g}, 90 % from {low:.3g} to {high:.3g}"


def _ninths_text(rows: Sequence[Sequence[int]], total: int) -> str:
    return "\n".join(" ".join(f"{count / max(1, total):4.0%}" for count in row) for row in rows)


ENOUGH_RECALL = 0.98  # of the boxes; below it new anchors are worthwhile
SMALLEST = 2.0  # pixels; a box with a shorter side teaches nothing
_MOST_BOXES = 20_000  # boxes used by a fit; recalls are computed from all boxes
_ROUNDS = 30  # of k-means
_CHANCE, _SPREAD = 0.2, 0.05  # that a side changes in a generation; by about this share at most


@dataclass(frozen=True)
class AnchorFit:
    """New anchors compared with the current ones.

    anchors_LA2: float32 input pixels, rounded to a tenth; sorted by area, the smallest in the
        first level.
    boxes: number of boxes.
    recall_before, recall_after: best possible recall, see `best_possible_recall`.
    fitness_before, fitness_after: see `fitness`.
    """

    anchors_LA2: np.ndarray
    boxes: int
    recall_before: float
    recall_after: float
    fitness_before: float
    fitness_after: float


def sizes_in_input(
    dataset: DetectionSet, image_size: tuple[int, int], resize: Resize
) -> np.ndarray:
    """Returns box sizes in input pixels, as evaluation sees them, float32 [N, 2].

    Crowds are left out, and boxes with a side under SMALLEST.

    Args:
        image_size: (height, width) of the input.
        resize: `data.resize`.
    """
    records = Records.of(dataset.records)
    image_M = records.image_O[~records.crowd_O]
    boxes_M4 = records.boxes_O4[~records.crowd_O]
    scale_N2 = _input_scales(records, image_size, resize).astype(np.float32)
    wh_M2 = (boxes_M4[:, 2:] - boxes_M4[:, :2]) * scale_N2[image_M]
    return wh_M2[(wh_M2 >= SMALLEST).all(axis=1)]


def best_possible_recall(wh_N2: np.ndarray, anchors_LA2: np.ndarray, threshold: float) -> float:
    """Computes the share of the boxes that some anchor fits; 1 without boxes.

    Only such boxes can be learned.  An anchor fits if the ratios of both widths and heights are
    below `threshold`.
    """
    if not len(wh_N2):
        return 1.0
    return float((_log_ratio(np.log(wh_N2), _log_sides(anchors_LA2)) < np.log(threshold)).mean())


def fitness(wh_N2: np.ndarray, anchors_LA2: np.ndarray, threshold: float) -> float:
    """Computes how well the best anchor fits, as a mean over boxes.

    That is the smaller of the ratios of width and height, each at most 1; 0 if no anchor fits.
    """
    return _fitness(np.log(wh_N2), _log_sides(anchors_LA2), threshold)


def fit_anchors(
    wh_N2: np.ndarray,
    before_LA2: np.ndarray,
    *,
    threshold: float = 4.0,
    generations: int = 1000,
    seed: int = 0,
) -> AnchorFit:
    """Fits new anchors, as many as the model has now.

    Equal arguments give equal anchors.  The start is the result of k-means on the logarithms of the
    sizes, or the current anchors if they are fitter; every generation then changes some sides of
    the fittest anchors at random, and is accepted if it is fitter.  Only one rank may fit: the last
    digit of a logarithm, and so the result, may depend on the processor.

    Args:
        wh_N2: box sizes, input pixels; see `sizes_in_input`.
        before_LA2: current anchors, input pixels.
        threshold: `anchor_threshold` of the model.
    Raises: DataError: there are fewer boxes than anchors.
    """
    levels, per_level, _ = before_LA2.shape
    wanted = levels * per_level
    if len(wh_N2) < wanted:
        raise DataError(
            f"{len(wh_N2)} boxes of at least {SMALLEST:g} pixels in the input are too few to fit "
            f"{wanted} anchors to",
            code="too_few_boxes",
            fix="give model.anchors, which stay",
        )
    rng = np.random.Generator(np.random.Philox(seed))
    # A fit looks at every box in every generation, so their number is limited.
    sample = rng.permutation(len(wh_N2))[:_MOST_BOXES]
    logs_N2 = np.log(wh_N2[np.sort(sample)].astype(np.float32))
    start_K2, before_K2 = _k_means(logs_N2, wanted, rng), _log_sides(before_LA2)
    if _fitness(logs_N2, before_K2, threshold) > _fitness(logs_N2, start_K2, threshold):
        start_K2 = before_K2
    sides_K2 = np.exp(_evolve(logs_N2, start_K2, threshold, generations, rng))
    sides_K2 = sides_K2[np.argsort(sides_K2.prod(axis=1), kind="stable")]
    anchors_LA2 = sides_K2.round(1).clip(min=0.1).astype(np.float32).reshape(before_LA2.shape)
    return AnchorFit(
        anchors_LA2=anchors_LA2,
        boxes=len(wh_N2),
        recall_before=best_possible_recall(wh_N2, before_LA2, threshold),
        recall_after=best_possible_recall(wh_N2, anchors_LA2, threshold),
        fitness_before=fitness(wh_N2, before_LA2, threshold),
        fitness_after=fitness(wh_N2, anchors_LA2, threshold),
    )


class Refit(NamedTuple):
    """New anchors if they are worthwhile, and a message for the log."""

    anchors_LA2: np.ndarray | None
    message: str


def refit_if_needed(
    wh_N2: np.ndarray, before_LA2: np.ndarray, *, threshold: float, seed: int
) -> Refit:
    """Refits the anchors if their recall over boxes is below ENOUGH_RECALL.

    Args: see `fit_anchors`.
    """
    recall = best_possible_recall(wh_N2, before_LA2, threshold)
    message = f"{recall:.1%} of the {len(wh_N2)} training boxes are within reach of an anchor"
    if recall >= ENOUGH_RECALL:
        return Refit(None, f"{message}; the anchors are kept")
    if len(wh_N2) < before_LA2.size // 2:
        return Refit(None, f"{message}, but there are too few boxes to fit others")
    fit = fit_anchors(wh_N2, before_LA2, threshold=threshold, seed=seed)
    if fit.recall_after <= recall:
        return Refit(None, f"{message}, and fitting finds no better ones; the anchors are kept")
    levels = [" ".join(f"{w:g},{h:g}" for w, h in level) for level in fit.anchors_LA2]
    after = f"{fit.recall_after:.1%} of anchors fitted to them"
    return Refit(fit.anchors_LA2, f"{message}, {after}: {'; '.join(levels)} (pixels)")


def _log_sides(anchors_LA2: np.ndarray) -> np.ndarray:
    return np.log(anchors_LA2.reshape(-1, 2).astype(np.float32))


def _log_ratio(logs_N2: np.ndarray, anchors_K2: np.ndarray) -> np.ndarray:
    """Computes the log of the worse of two side ratios to the best anchor, [N].

    Both arguments are logarithms.
    """
    best_N = np.full(len(logs_N2), np.inf, np.float32)
    for anchor_2 in anchors_K2:
        wide_N, high_N = np.abs(logs_N2 - anchor_2).T
        np.minimum(best_N, np.maximum(wide_N, high_N), out=best_N)
    return best_N


def _fitness(logs_N2: np.ndarray, anchors_K2: np.ndarray, threshold: float) -> float:
    ratio_N = _log_ratio(logs_N2, anchors_K2)
    return float((np.exp(-ratio_N) * (ratio_N < np.log(threshold))).mean(dtype=np.float64))


def _k_means(logs_N2: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Computes K-means centres [K, 2], started as in k-means++: distant points are likelier.

    Source: Arthur and Vassilvitskii 2007, k-means++.
    """
    centres = [logs_N2[rng.integers(len(logs_N2))]]
    far_N = np.full(len(logs_N2), np.inf)
    for _ in range(count - 1):
        far_N = np.minimum(far_N, ((logs_N2 - centres[-1]) ** 2).sum(axis=1, dtype=np.float64))
        total = far_N.sum()
        chance_N = far_N / total if total > 0 else None  # None: all boxes are alike
        centres.append(logs_N2[rng.choice(len(logs_N2), p=chance_N)])
    centres_K2 = np.stack(centres)
    for _ in range(_ROUNDS):
        apart_NK = ((logs_N2[:, None] - centres_K2) ** 2).sum(axis=2)
        nearest_N = apart_NK.argmin(axis=1)
        size_K = np.bincount(nearest_N, minlength=count)
        sums = [np.bincount(nearest_N, logs_N2[:, side], minlength=count) for side in (0, 1)]
        means_K2 = np.stack(sums, axis=1) / np.maximum(size_K, 1)[:, None]
        # A cluster without boxes keeps its centre.
        centres_K2 = np.where(size_K[:, None] > 0, means_K2, centres_K2).astype(np.float32)
    return centres_K2


def _evolve(
    logs_N2: np.ndarray,
    start_K2: np.ndarray,
    threshold: float,
    generations: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Evolves anchors, in logarithms, by `generations` random changes of the fittest so far."""
    best_K2, best_score = start_K2, _fitness(logs_N2, start_K2, threshold)
    for _ in range(generations):
        changed_K2 = rng.random(best_K2.shape) < _CHANCE
        # A random step size: mostly small changes, sometimes a large one.
        step_K2 = rng.standard_normal(best_K2.shape) * (_SPREAD * rng.random())
        mutant_K2 = (best_K2 + changed_K2 * step_K2).astype(np.float32)
        score = _fitness(logs_N2, mutant_K2, threshold)
        if score > best_score:
            best_K2, best_score = mutant_K2, score
    return best_K2
