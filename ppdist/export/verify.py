"""Compares an exported file with its model; raises ExportError where they differ.

The raw outputs are compared number by number.  After a non-maximum suppression that is not
possible: one rounding can decide which of two equal boxes stays.  So the suppressed rows are
    compared with the rows that the same suppression keeps from the raw outputs, and a row may be
    missing on one side only where rounding can decide whether it is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import paddle

from ppdist.common.errors import ExportError
from ppdist.common.machine import available_cores
from ppdist.config.evaluate import NMSConfig
from ppdist.config.runtime import RuntimeOptions
from ppdist.data.boxes import box_iou
from ppdist.export.predictor import (
    open_graph,
    split_rows,
    suppress,
)
from ppdist.export.spec import InputSection
from ppdist.models.base import Detector, ImageModel
from ppdist.runtime.predictor import Graph

SCORE_TOLERANCE = 1e-4
BOX_TOLERANCE = 0.05  # pixels, for a box with sides up to
_LARGE_BOX = 500.0  # pixels; for a larger box in proportion
_SCORE_TIE = 2 * SCORE_TOLERANCE  # difference of two scores, each off by the tolerance
_IOU_TIE = 1e-3
_MOST_QUERIES = 1000
_MOVED = 1e-3  # shift of a pixel (0..255); ten times the rounding of a runtime
PLAIN = "Paddle Inference without oneDNN"
_BACKENDS = (("Paddle Inference with oneDNN", True), (PLAIN, False))
Raw = tuple[np.ndarray, ...]  # scores_BNC and boxes_BN4, or probabilities_BC alone


@dataclass(frozen=True)
class Agreement:
    """The largest differences from eager.

    score: difference of scores, which are in 0..1; for a classifier, of probabilities.
    box: pixels, of a box with a side beyond _LARGE_BOX in proportion; None: a classifier.
    boxes: number of boxes compared; ties: number of boxes that only one side kept because of
        rounding.
    """

    score: float
    box: float | None
    output_names: tuple[str, ...] = ()
    boxes: int = 0
    ties: int = 0


def merge_agreements(agreements: Sequence[Agreement]) -> Agreement:
    """Returns the largest differences of all images or batches."""
    boxes = [part.box for part in agreements if part.box is not None]
    return Agreement(
        score=max(part.score for part in agreements),
        box=max(boxes, default=None),
        output_names=agreements[-1].output_names,
        boxes=sum(part.boxes for part in agreements),
        ties=sum(part.ties for part in agreements),
    )


def check_images(description: InputSection, samples: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Builds the batches_B3HW used for comparison, float32 RGB 0..255.

    They contain generated pictures, also in other batch and image sizes where these are dynamic in
    the graph, and the given samples.
    """
    height, width = description.size
    step = description.size_multiple
    sizes = [(1, height, width)]
    if description.dynamic_batch:
        sizes.append((2, height, width))
    if description.dynamic_size:
        sizes.append((1, height + step, max(step, width - step)))
    batches = [_draw_batch(*size) for size in sizes]
    return batches + [np.asarray(sample, np.float32)[None] for sample in samples]


def _draw_batch(batch: int, height: int, width: int) -> np.ndarray:
    """Draws coloured rectangles on noise: edges, flat areas and saturated pixels."""
    rng = np.random.Generator(np.random.Philox(batch * 1_000_003 + height * 1009 + width))
    images = rng.integers(90, 160, (batch, 3, height, width))
    for image in images:
        for _ in range(12):
            top, left = rng.integers(0, height - 8), rng.integers(0, width - 8)
            tall, wide = rng.integers(8, height // 2 + 8), rng.integers(8, width // 2 + 8)
            colour = rng.integers(0, 256, (3, 1, 1))
            image[:, top : top + tall, left : left + wide] = colour
    return images.astype(np.float32)


@paddle.no_grad()
def eager_outputs(model: ImageModel, images: Sequence[np.ndarray]) -> list[Raw]:
    """Returns the model's decoded outputs for each batch_B3HW."""
    outputs = [model.predict(paddle.to_tensor(batch)) for batch in images]
    return [
        tuple(part.numpy() for part in (output if isinstance(output, tuple) else (output,)))
        for output in outputs
    ]


def decided_batches(model: ImageModel, images: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Selects the batches_B3HW in which rounding does not choose the queries.

    A query model selects the best cells, and attention makes every query depend on the selection.
    Where the last selected cell is as good as the next one, rounding moves all outputs by more than
    a tolerance.  For such a batch, eager's outputs also change when its pixels change by less than
    their precision.

    Returns: all batches if every one is undecided, or if the model has no queries.
    """
    if not isinstance(model, Detector) or model.strides:
        return list(images)
    rng, decided = np.random.default_rng(0), []
    for batch in images:
        move = rng.uniform(-_MOVED, _MOVED, batch.shape).astype(np.float32)
        expected, *moved = eager_outputs(model, [batch, batch + move, batch - move])
        difference = merge_agreements(
            [raw_differences(outputs, expected, "eager") for outputs in moved]
        )
        if difference.score <= SCORE_TOLERANCE and (difference.box or 0.0) <= BOX_TOLERANCE:
            decided.append(batch)
    return decided or list(images)


def load_graphs(directory: Path) -> dict[str, Graph]:
    """Loads directory/model.json in Paddle Inference, by backend: with and without oneDNN.

    Raises: ExportError: Paddle cannot load it.
    """
    files = directory / "model.json", directory / "model.pdiparams"
    return {
        backend: open_graph(files, RuntimeOptions(onednn=onednn, threads=_cores()))
        for backend, onednn in _BACKENDS
    }


def load_onnx(file: Path) -> dict[str, Graph]:
    """Loads an ONNX file in ONNX Runtime, like load_graphs."""
    options = RuntimeOptions(backend="onnx", threads=_cores(), spinning=False)
    return {"ONNX Runtime": open_graph([file], options)}


def _cores() -> int:
    return max(1, int(available_cores()))


class _CachedGraph:
    """A graph that caches its outputs, for checks that share batches."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._cache = graph, list[tuple[np.ndarray, tuple[np.ndarray, ...]]]()
        self.output_names = graph.output_names

    def __call__(self, batch_B3HW: np.ndarray) -> tuple[np.ndarray, ...]:
        for batch, outputs in self._cache:
            if batch is batch_B3HW:
                return outputs
        self._cache.append((batch_B3HW, self._graph(batch_B3HW)))
        return self._cache[-1][1]


def cache_outputs(graphs: dict[str, Graph]) -> dict[str, Graph]:
    """Wraps graphs so that they compute each batch once."""
    return {name: _CachedGraph(graph) for name, graph in graphs.items()}


def load_openvino(file: Path) -> dict[str, Graph]:
    """Loads an ONNX file in OpenVINO, like load_graphs."""
    return {"OpenVINO": open_graph([file], RuntimeOptions(backend="openvino"))}


def compare_raw(
    graphs: dict[str, Graph], images: Sequence[np.ndarray], expected: Sequence[Raw]
) -> Agreement:
    """Compares a saved graph's outputs with eager's, on every backend.

    Raises: ExportError: a backend fails or differs by more than the tolerances.
    """
    differences = {
        name: measure_raw({name: graph}, images, expected) for name, graph in graphs.items()
    }
    for backend, difference in differences.items():
        if difference.score <= SCORE_TOLERANCE and (difference.box or 0.0) <= BOX_TOLERANCE:
            continue
        score_kind = "probabilities" if difference.box is None else "scores"
        description = f"{score_kind} by up to {difference.score:.3g} (allowed {SCORE_TOLERANCE:g})"
        if difference.box is not None:
            description += f", boxes by up to {difference.box:.3g} px (allowed {BOX_TOLERANCE:g})"
        raise ExportError(
            f"{backend} does not compute what the model computes, it differs in {description}",
            code="export_differs",
            fix="nothing was kept: export to another --format, or use the weights themselves: "
            "ppdist predict -w WEIGHTS",
        )
    return merge_agreements(list(differences.values()))


def measure_raw(
    graphs: dict[str, Graph], images: Sequence[np.ndarray], expected: Sequence[Raw]
) -> Agreement:
    """Measures the differences like compare_raw, for a model in fewer bits, without tolerances."""
    agreements = []
    for backend, graph in graphs.items():
        for batch, expected_outputs in zip(images, expected, strict=True):
            agreement = raw_differences(_run(graph, batch, backend), expected_outputs, backend)
            agreements.append(replace(agreement, output_names=graph.output_names))
    return merge_agreements(agreements)


def compare_suppressed(
    graphs: dict[str, Graph],
    raw: dict[str, Graph],
    images: Sequence[np.ndarray],
    nms: NMSConfig,
) -> tuple[str, ...]:
    """Compares a graph with NMS with the raw graph's outputs after NMS.

    Returns: the names of the graph's outputs.
    Raises: ExportError: as compare_raw.
    """
    for backend, graph in graphs.items():
        for batch in images:
            outputs = _run(raw[backend], batch, backend)
            suppressed_differences(_run(graph, batch, backend), outputs, nms, backend)
    return graph.output_names


def compare_rows(
    graphs: dict[str, Graph],
    images: Sequence[np.ndarray],
    expected: Sequence[Raw],
    nms: NMSConfig,
) -> Agreement:
    """Compares a graph with NMS with the eager model's outputs after NMS.

    Raises: ExportError: as compare_raw.
    """
    return merge_agreements(
        [
            suppressed_differences(_run(graph, batch, backend), expected_outputs, nms, backend)
            for backend, graph in graphs.items()
            for batch, expected_outputs in zip(images, expected, strict=True)
        ]
    )


def _run(graph: Graph, images_B3HW: np.ndarray, backend: str) -> tuple[np.ndarray, ...]:
    try:
        return graph(images_B3HW)
    except Exception as error:  # ONNX Runtime's exceptions share no narrower base
        raise ExportError(
            f"{backend} cannot run the exported model: {error}", code="runtime_failed"
        ) from error


def raw_differences(got: Raw, true: Raw, where: str) -> Agreement:
    """Measures the differences between the outputs for one batch.

    Raises: ExportError: the shapes differ, or numbers are not finite.
    """
    shapes = [[list(part.shape) for part in side] for side in (got, true)]
    if shapes[0] != shapes[1]:
        raise ExportError(
            f"{where} gives outputs of the shapes {shapes[0]}, eager of {shapes[1]}",
            code="export_differs",
        )
    if len(true) > 1:
        got = _match_order(got, true)
    score = float(np.abs(got[0] - true[0]).max())
    box = float(_box_distance(got[1], true[1]).max()) if len(true) > 1 else None
    if not np.isfinite([score, box or 0.0]).all():
        raise ExportError(f"{where} gives numbers that are not finite", code="export_differs")
    return Agreement(score, box, boxes=0 if box is None else true[1].shape[0] * true[1].shape[1])


def _match_order(got: Raw, true: Raw) -> Raw:
    """Reorders the predictions of `got` to match the order of `true`.

    A query model returns the best cell's prediction first, and rounding may decide which of two
    cells is better.  So predictions that are out of place are matched with each other, the nearest
    first, each at most once.
    """
    ordered = [part.copy() for part in got]
    for scores_NC, boxes_N4, true_NC, true_N4 in zip(*ordered, *true, strict=True):
        wrong_N = np.abs(scores_NC - true_NC).max(-1) > SCORE_TOLERANCE
        wrong_N |= _box_distance(boxes_N4, true_N4) > BOX_TOLERANCE
        (misplaced_L,) = np.nonzero(wrong_N)
        # This many mismatches are not swaps of neighbours; the comparison reports them.
        if len(misplaced_L) > _MOST_QUERIES:
            continue
        score_LL = np.abs(scores_NC[misplaced_L] - true_NC[misplaced_L, None]).max(-1)
        distance_LL = score_LL / SCORE_TOLERANCE
        distance_LL += (
            _box_distance(boxes_N4[misplaced_L], true_N4[misplaced_L, None]) / BOX_TOLERANCE
        )
        order_L = np.empty_like(misplaced_L)
        for _ in misplaced_L:
            place, match = np.unravel_index(distance_LL.argmin(), distance_LL.shape)
            order_L[place] = misplaced_L[match]
            distance_LL[place], distance_LL[:, match] = np.inf, np.inf
        scores_NC[misplaced_L], boxes_N4[misplaced_L] = scores_NC[order_L], boxes_N4[order_L]
    return ordered[0], ordered[1]


def suppressed_differences(
    got: tuple[np.ndarray, ...], raw: Raw, nms: NMSConfig, where: str
) -> Agreement:
    """Compares rows_R6 and count_B of a batch with raw outputs after NMS.

    Raises: ExportError: a row is on one side only, and rounding does not explain it.
    """
    (rows_R6, count_B), (scores_BNC, boxes_BN4) = got, raw
    batch, _, classes = scores_BNC.shape
    is_consistent = len(count_B) == batch and count_B.sum() == len(rows_R6)
    if not is_consistent or not np.isin(rows_R6[:, 0], np.arange(classes)).all():
        raise ExportError(
            f"{len(rows_R6)} rows with the counts {count_B.tolist()} are not what suppression "
            f"leaves of {batch} images and {classes} classes",
            code="export_differs",
            where=where,
        )
    with paddle.no_grad():
        expected = suppress(paddle.to_tensor(scores_BNC), paddle.to_tensor(boxes_BN4), nms)
    agreements = []
    for got_R6, true_R6, image_raw in zip(split_rows(*got), expected, zip(*raw), strict=True):
        unexplained = unexplained_rows(got_R6, true_R6, nms, image_raw)
        if unexplained:
            raise ExportError(
                f"{unexplained} of {len(got_R6)} boxes after the non-maximum suppression in the "
                f"graph are not those of eager ({len(true_R6)})",
                code="export_differs",
                where=where,
            )
        pairs_P2 = _match_rows(got_R6, true_R6)
        got_pairs, true_pairs = got_R6[pairs_P2[:, 0]], true_R6[pairs_P2[:, 1]]
        score = np.abs(got_pairs[:, 1] - true_pairs[:, 1]).max(initial=0.0)
        box = _box_distance(got_pairs[:, 2:], true_pairs[:, 2:]).max(initial=0.0)
        ties = len(got_R6) + len(true_R6) - 2 * len(pairs_P2)
        agreements.append(Agreement(float(score), float(box), boxes=len(true_R6), ties=ties))
    return merge_agreements(agreements)


def _box_distance(got: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Computes the distance between boxes[..., 4], scaled like Agreement.box.

    Sides are multiples of exponentials of what the model computes, so rounding grows with them.
    """
    side = (true[..., 2:] - true[..., :2]).max(-1)
    return np.abs(got - true).max(-1) / np.maximum(1.0, side / _LARGE_BOX)


def unexplained_rows(
    got_R6: np.ndarray, true_R6: np.ndarray, nms: NMSConfig, raw: Raw | None = None
) -> int:
    """Counts the rows without a counterpart that rounding cannot explain.

    Rows of both sides count.  Rounding can decide whether a row at a threshold is kept
    (_is_at_threshold), and hence which rows it suppresses.
    Args: raw: scores_NC and boxes_N4 of the image.  With it, two more cases are explained: either
        of two overlapping rows with nearly equal scores may stay, and scores may be at the
        candidate limit.
    """
    sides = got_R6, true_R6
    pairs_P2 = _match_rows(got_R6, true_R6)
    unmatched = [np.delete(side, pairs_P2[:, i], axis=0) for i, side in enumerate(sides)]
    explained = [_is_at_threshold(unmatched[i], sides[i], sides[1 - i], nms) for i in (0, 1)]
    overlap_GT = _iou(unmatched[0], unmatched[1], nms) >= _iou_limit(nms) - _IOU_TIE
    # The scores of `got` above those of `true`.
    better_GT = unmatched[0][:, None, 1] - unmatched[1][None, :, 1]
    if raw is not None:
        alike_GT = overlap_GT & (np.abs(better_GT) <= _SCORE_TIE)
        explained[0] |= alike_GT.any(1) | _last_candidates(unmatched[0], raw[0], nms)
        explained[1] |= alike_GT.any(0) | _last_candidates(unmatched[1], raw[0], nms)
    for _ in range(sum(map(len, unmatched))):  # no chain is longer
        explained[0] |= (overlap_GT & (better_GT <= _SCORE_TIE) & explained[1][None]).any(1)
        explained[1] |= (overlap_GT & (better_GT >= -_SCORE_TIE) & explained[0][:, None]).any(0)
    if raw is not None:
        explained[0] &= _is_predicted(unmatched[0], raw)
    return sum(int((~part).sum()) for part in explained)


def _iou_limit(nms: NMSConfig) -> float:
    """Returns the IoU threshold of NMS; infinite if nothing is suppressed."""
    return np.inf if nms.iou_threshold is None else nms.iou_threshold


def _last_candidates(rows_R6: np.ndarray, scores_NC: np.ndarray, nms: NMSConfig) -> np.ndarray:
    """Finds the rows [R] that tie at the candidate limit of their class.

    Such a score is close to both the last candidate kept and the next candidate.
    """
    count, classes = scores_NC.shape
    if count <= nms.candidates or nms.iou_threshold is None:
        return np.zeros(len(rows_R6), bool)
    if nms.class_agnostic:  # the candidates of all classes together
        scores_NC = np.broadcast_to(scores_NC.max(1, keepdims=True), scores_NC.shape)
    elif not nms.multi_label:
        best_N1 = scores_NC.argmax(1)[:, None]
        scores_NC = np.where(np.arange(classes) == best_N1, scores_NC, 0)
    first = count - nms.candidates
    limits_2C = np.partition(scores_NC, [first - 1, first], axis=0)[first - 1 : first + 1]
    limits_2R = limits_2C[:, rows_R6[:, 0].astype(int)]
    return (np.abs(rows_R6[:, 1] - limits_2R) <= _SCORE_TIE).all(0)


def _is_predicted(rows_R6: np.ndarray, raw: Raw) -> np.ndarray:
    """Returns for each row [R] whether it is among the predictions."""
    scores_NC, boxes_N4 = raw
    is_predicted = []
    for row in rows_R6:
        near_N = np.abs(scores_NC[:, int(row[0])] - row[1]) <= SCORE_TOLERANCE
        is_predicted.append((near_N & (_box_distance(row[2:], boxes_N4) <= BOX_TOLERANCE)).any())
    return np.array(is_predicted, bool)


def _match_rows(got_R6: np.ndarray, true_R6: np.ndarray) -> np.ndarray:
    """Matches rows; returns their indices [P, 2] in `got_R6` and `true_R6`.

    Rows match if they have the same class, and scores and boxes within the tolerances. The nearest
    rows are matched first, each row at most once.
    """
    pairs = []
    free_R = np.ones(len(true_R6), bool)
    for index, row in enumerate(got_R6):
        distance_R = _box_distance(row[2:], true_R6[:, 2:])
        near_R = free_R & (true_R6[:, 0] == row[0]) & (distance_R <= BOX_TOLERANCE)
        near_R &= np.abs(true_R6[:, 1] - row[1]) <= SCORE_TOLERANCE
        if near_R.any():
            best = np.flatnonzero(near_R)[distance_R[near_R].argmin()]
            free_R[best] = False
            pairs.append((index, best))
    return np.array(pairs, np.int64).reshape(-1, 2)


def _is_at_threshold(
    rows_R6: np.ndarray,
    own_R6: np.ndarray,
    other_R6: np.ndarray,
    nms: NMSConfig,
) -> np.ndarray:
    """Returns which rows [R] that only one side kept were at a threshold.

    A row is at the score threshold; or at the lowest score of the other side's full list; or its
    IoU with a better row of its class (or of any, if agnostic) is at the IoU threshold, or is
    meaningless because the box is thinner than the tolerance (runtimes also differ on boxes without
    area); or two classes of one box have nearly equal scores and only one may stay.
    """
    scores_R = rows_R6[:, 1]
    tied_R = np.abs(scores_R - nms.score_threshold) <= _SCORE_TIE
    if len(other_R6) >= nms.keep:
        tied_R |= scores_R <= other_R6[:, 1].min() + _SCORE_TIE
    # A box this thin has no meaningful IoU.
    tied_R |= (rows_R6[:, 4:] - rows_R6[:, 2:4]).min(1) <= BOX_TOLERANCE
    all_rows = np.concatenate([own_R6, other_R6])
    is_better = all_rows[None, :, 1] >= scores_R[:, None] - _SCORE_TIE
    is_at_iou = np.abs(_iou(rows_R6, all_rows, nms) - _iou_limit(nms)) <= _IOU_TIE
    tied_R |= (is_better & is_at_iou).any(1)
    if not nms.multi_label or nms.class_agnostic:
        is_alike = np.abs(other_R6[None, :, 1] - scores_R[:, None]) <= _SCORE_TIE
        is_alike &= other_R6[None, :, 0] != rows_R6[:, None, 0]
        is_alike &= _box_distance(rows_R6[:, None, 2:], other_R6[None, :, 2:]) <= BOX_TOLERANCE
        tied_R |= is_alike.any(1)
    return tied_R


def _iou(rows_R6: np.ndarray, rows_S6: np.ndarray, nms: NMSConfig) -> np.ndarray:
    """Computes the pairwise IoU of rows [R, S]; -1 where one never suppresses the other."""
    same = nms.class_agnostic | (rows_R6[:, None, 0] == rows_S6[None, :, 0])
    return np.where(same, box_iou(rows_R6[:, 2:], rows_S6[:, 2:]), -1.0)
