"""Does an exported file compute what the model computes?  Every check raises ExportError if not.

The raw outputs are compared number by number.  After a non-maximum suppression that is not
possible: one rounding can decide which of two equal boxes stays.  So the suppressed rows are
compared with those that the same suppression keeps of the exported raw outputs, row by row, and
a row may be missing on one side only where a threshold was a tie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import paddle

from ppdist.errors import ExportError
from ppdist.infer_spec import InputSection
from ppdist.inference import InferenceGraph, split_rows, suppress
from ppdist.postprocess import NMSConfig

SCORE_TOLERANCE = 1e-4
BOX_TOLERANCE = 0.05  # pixels, of a box with sides up to
_LARGE_BOX = 500.0  # pixels; of a larger one in proportion
_IOU_TIE = 1e-3
_BACKENDS = (
    ("Paddle Inference with oneDNN", True),
    ("Paddle Inference without oneDNN", False),
)
_PADDLE_ERRORS = (RuntimeError, ValueError, IndexError, OSError)


@dataclass(frozen=True)
class Agreement:
    """Largest differences from eager over all pictures and backends."""

    score: float  # 0..1; of a classifier: the probability
    box: float | None  # pixels; None: a classifier, which gives no boxes
    output_names: tuple[str, ...] = ()


def check_images(description: InputSection, samples: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Batches_B3HW to compare on: generated pictures, other batch and image sizes where the graph
    leaves them free, and the given samples; float32 RGB 0..255."""
    height, width = description.size
    step = description.size_multiple
    sizes = [(1, height, width)]
    if description.dynamic_batch:
        sizes.append((2, height, width))
    if description.dynamic_size:
        sizes.append((1, height + step, max(step, width - step)))
    batches = [_picture(*size) for size in sizes]
    return batches + [np.asarray(sample, np.float32)[None] for sample in samples]


def _picture(batch: int, height: int, width: int) -> np.ndarray:
    """Coloured rectangles on noise: edges, flat areas and saturated pixels."""
    rng = np.random.Generator(np.random.Philox(batch * 1_000_003 + height * 1009 + width))
    images = rng.integers(90, 160, (batch, 3, height, width))
    for image in images:
        for _ in range(12):
            top, left = rng.integers(0, height - 8), rng.integers(0, width - 8)
            tall, wide = rng.integers(8, height // 2 + 8), rng.integers(8, width // 2 + 8)
            colour = rng.integers(0, 256, (3, 1, 1))
            image[:, top : top + tall, left : left + wide] = colour
    return images.astype(np.float32)


class _Output(NamedTuple):
    name: str
    tolerance: float
    unit: str = ""


_OUTPUTS = (_Output("scores", SCORE_TOLERANCE), _Output("boxes", BOX_TOLERANCE, " px"))
_CLASS_OUTPUT = (_Output("probabilities", SCORE_TOLERANCE),)
Raw = tuple[np.ndarray, ...]  # scores_BNC and boxes_BN4, or probabilities_BC alone


def load_graphs(directory: Path) -> dict[str, InferenceGraph]:
    """directory/model.json in Paddle Inference, by backend: with and without oneDNN.

    Raises: ExportError: Paddle cannot load it.
    """
    files = directory / "model.json", directory / "model.pdiparams"
    graphs = {}
    for backend, onednn in _BACKENDS:
        try:
            graphs[backend] = InferenceGraph(*files, onednn=onednn, threads=1)
        except _PADDLE_ERRORS as error:
            raise ExportError(f"{backend} cannot load the exported model: {error}") from error
    return graphs


def compare_raw(
    graphs: dict[str, InferenceGraph], images: Sequence[np.ndarray], expected: Sequence[Raw]
) -> Agreement:
    """A saved graph's outputs against eager's, on every backend.

    Raises: ExportError: a backend fails or differs by more than the tolerances.
    """
    worst = []
    for backend, graph in graphs.items():
        got = [_run(graph, batch, backend) for batch in images]
        worst.append(_differences(got, expected, backend))
    return _agreement(np.max(worst, axis=0), graph.output_names)


def compare_kept(
    kept: dict[str, InferenceGraph],
    raw: dict[str, InferenceGraph],
    images: Sequence[np.ndarray],
    nms: NMSConfig,
) -> tuple[str, ...]:
    """The rows of a graph with suppression against the suppressed outputs of the one without.

    Returns: names of the graph's outputs.
    Raises: ExportError: as compare_raw.
    """
    for backend, graph in kept.items():
        for batch in images:
            rows_R6, count_B = _run(graph, batch, backend)
            scores, boxes = _run(raw[backend], batch, backend)
            with paddle.no_grad():
                expected = suppress(paddle.to_tensor(scores), paddle.to_tensor(boxes), nms)
            for got, true in zip(split_rows(rows_R6, count_B), expected):
                strange = unexplained_rows(got, true, nms)
                if strange:
                    raise ExportError(
                        f"{backend}: {strange} of {len(got)} boxes after the non-maximum "
                        f"suppression in the graph are not those of eager ({len(true)}); "
                        "nothing was kept"
                    )
    return graph.output_names


def _run(graph: InferenceGraph, images_B3HW: np.ndarray, backend: str) -> tuple[np.ndarray, ...]:
    try:
        return graph(images_B3HW)
    except _PADDLE_ERRORS as error:
        raise ExportError(f"{backend} cannot run the exported model: {error}") from error


def run_onnx(file: Path, images: Sequence[np.ndarray], expected: Sequence[Raw]) -> Agreement:
    """As compare_raw, for ONNX Runtime on the CPU."""
    import onnxruntime

    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # its warnings about unused constants are noise here
        session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
        name = session.get_inputs()[0].name
        got = [tuple(session.run(None, {name: batch})) for batch in images]
    except Exception as error:  # its exceptions share no narrower base
        raise ExportError(f"ONNX Runtime cannot run the exported model: {error}") from error
    worst = _differences(got, expected, "ONNX Runtime")
    return _agreement(worst, tuple(output.name for output in session.get_outputs()))


def _differences(
    got: Sequence[tuple[np.ndarray, ...]], expected: Sequence[Raw], where: str
) -> np.ndarray:
    """The largest difference of each output over all batches, [1] or [2]."""
    kinds = _OUTPUTS if len(expected[0]) > 1 else _CLASS_OUTPUT
    largest = np.zeros(len(kinds))
    for found, true in zip(got, expected):
        shapes = [list(part.shape) for part in found], [list(part.shape) for part in true]
        if shapes[0] != shapes[1]:
            raise ExportError(
                f"{where}: {_shaped(kinds, shapes[0])}, eager gives {_shaped(kinds, shapes[1])}; "
                f"nothing was kept"
            )
        errors = np.array([np.abs(one - other).max() for one, other in zip(found, true)])
        beyond = [
            np.abs(one - other).max(-1) > kind.tolerance * _room(kind, other)
            for one, other, kind in zip(found, true, kinds)
        ]
        if not np.isfinite(errors).all() or any(part.any() for part in beyond):
            differ = ", ".join(
                f"{kind.name} by up to {error:.3g}{kind.unit} (allowed {kind.tolerance:g})"
                for error, kind in zip(errors, kinds)
            )
            raise ExportError(
                f"{where} does not compute what the model computes, it differs in {differ}; "
                "nothing was kept"
            )
        largest = np.maximum(largest, errors)
    return largest


def _room(kind: _Output, true: np.ndarray) -> np.ndarray:
    """How many tolerances each row may be off: one, but a box per _LARGE_BOX pixels of its side.

    Sides are multiples of exponentials of what the model computes, so rounding grows with them.
    """
    if kind is not _OUTPUTS[1]:
        return np.ones(true.shape[:-1])
    return np.maximum(1.0, (true[..., 2:] - true[..., :2]).max(-1) / _LARGE_BOX)


def _shaped(kinds: Sequence[_Output], shapes: list[list[int]]) -> str:
    return " and ".join(f"{kind.name} {shape}" for kind, shape in zip(kinds, shapes))


def _agreement(largest: np.ndarray, names: tuple[str, ...]) -> Agreement:
    return Agreement(float(largest[0]), float(largest[1]) if len(largest) > 1 else None, names)


def unexplained_rows(got_R6: np.ndarray, true_R6: np.ndarray, nms: NMSConfig) -> int:
    """How many rows of either side have no partner on the other and no tie that explains it.

    Partners have the same class, and score and box within the tolerances.  A tie: the score is at
    the threshold, or at the lowest kept score of a full list, or the IoU with another row of the
    class is at the IoU threshold; or two classes of one box score alike and only one may stay.
    """
    partner = (
        (got_R6[:, None, 0] == true_R6[None, :, 0])
        & (np.abs(got_R6[:, None, 1] - true_R6[None, :, 1]) <= SCORE_TOLERANCE)
        & (
            np.abs(got_R6[:, None, 2:] - true_R6[None, :, 2:]).max(-1)
            <= BOX_TOLERANCE * _room(_OUTPUTS[1], true_R6[:, 2:])
        )
    )
    taken = np.zeros(len(true_R6), bool)
    lonely = []
    for row, candidates in zip(got_R6, partner):
        free = np.flatnonzero(candidates & ~taken)
        if len(free):
            taken[free[0]] = True
        else:
            lonely.append(row)
    lonely += list(true_R6[~taken])
    everything = np.concatenate([got_R6, true_R6])
    full = max(len(got_R6), len(true_R6)) >= nms.keep
    lowest = everything[:, 1].min() if full and len(everything) else -1.0
    return sum(not _is_tie(row, everything, lowest, nms) for row in lonely)


def _is_tie(row: np.ndarray, everything_R6: np.ndarray, lowest: float, nms: NMSConfig) -> bool:
    if min(abs(row[1] - nms.score_threshold), abs(row[1] - lowest)) <= 2 * SCORE_TOLERANCE:
        return True
    if not nms.multi_label:
        near = np.abs(everything_R6[:, 1] - row[1]) <= 2 * SCORE_TOLERANCE
        near &= np.abs(everything_R6[:, 2:] - row[2:]).max(1) <= BOX_TOLERANCE
        if (near & (everything_R6[:, 0] != row[0])).any():
            return True
    same = everything_R6[everything_R6[:, 0] == row[0], 2:]
    size = np.minimum(same[:, 2:], row[4:]) - np.maximum(same[:, :2], row[2:4])
    overlap = np.prod(size.clip(0), axis=1)
    union = np.prod(same[:, 2:] - same[:, :2], axis=1) + np.prod(row[4:] - row[2:4]) - overlap
    return bool((np.abs(overlap / union.clip(1e-9) - nms.iou_threshold) <= _IOU_TIE).any())
