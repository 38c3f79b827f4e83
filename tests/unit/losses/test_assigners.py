"""ATSS and TAL against small loops over the papers' definitions, and their memory."""

import subprocess
import sys

import numpy as np
import paddle
import pytest

from ppdist.losses.assigners import Assignment, atss_assigner, nearest_cells, task_aligned_assigner

STRIDES = (32, 16, 8)
SIZES = [(4, 5), (8, 10), (16, 20)]  # a 128 x 160 image
CLASSES = 4
TAL = {"topk": 13, "alpha": 1.0, "beta": 6.0}  # as published


def cells() -> tuple[np.ndarray, np.ndarray]:
    points = [
        [(x + 0.5) * s, (y + 0.5) * s]
        for (h, w), s in zip(SIZES, STRIDES)
        for y in range(h)
        for x in range(w)
    ]
    strides = [s for (h, w), s in zip(SIZES, STRIDES) for _ in range(h * w)]
    return np.array(points, "float32"), np.array(strides, "float32")[:, None]


def random_truth(boxes: int, real: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    size = rng.uniform(6, 90, (boxes, 2))
    low = rng.uniform(0, np.array([160, 128]) - size)
    mask = np.arange(boxes) < real
    box = np.where(mask[:, None], np.concatenate([low, low + size], 1), 0)
    labels = rng.integers(0, CLASSES, boxes) * mask
    return box.astype("float32"), labels.astype("int64"), mask.astype("float32")


def iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """IoU [M, N] of boxes a [M, 4] and b [N, 4]."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    inter = (np.minimum(a[:, None, 2:], b[None, :, 2:]) - low).clip(0).prod(-1)
    areas = [(x[:, 2:] - x[:, :2]).clip(0).prod(-1) for x in (a, b)]
    return inter / (areas[0][:, None] + areas[1][None] - inter + 1e-9)


def inside(points: np.ndarray, box: np.ndarray) -> np.ndarray:
    return ((points > box[:2] + 1e-9) & (points < box[2:] - 1e-9)).all(1)


def settle(named: np.ndarray, overlap_MN: np.ndarray) -> np.ndarray:
    """Owner [N] of each prediction, -1 for none."""
    best = np.where(named.sum(0) > 1, overlap_MN.argmax(0), named.argmax(0))
    return np.where(named.any(0), best, -1)


def atss_by_loops(box: np.ndarray, mask: np.ndarray) -> np.ndarray:
    points, strides = cells()
    anchors = np.concatenate([points - 2.5 * strides, points + 2.5 * strides], 1)
    overlap = iou(box, anchors)
    named = np.zeros(overlap.shape, bool)
    for m in range(len(box)):
        candidates, start = [], 0
        for h, w in SIZES:
            level = points[start : start + h * w]
            far = np.hypot(*(level - (box[m, :2] + box[m, 2:]) / 2).T)
            candidates += list(start + np.argsort(far, kind="stable")[:9])
            start += h * w
        values = overlap[m, candidates]
        threshold = values.mean() + values.std(ddof=1)
        for n in candidates:
            ok = overlap[m, n] > threshold and inside(points[n : n + 1], box[m])[0]
            named[m, n] = ok and mask[m] > 0
    return settle(named, overlap)


def tal_by_loops(
    scores_CN: np.ndarray,
    pred: np.ndarray,
    box: np.ndarray,
    labels: np.ndarray,
    mask: np.ndarray,
    radius: float | None,
) -> tuple[np.ndarray, np.ndarray]:
    points, strides = cells()
    overlap = iou(box, pred)
    align = scores_CN[labels] * overlap**6
    named = np.zeros(overlap.shape, bool)
    for m in range(len(box)):
        if radius is None:
            allowed = inside(points, box[m])
        else:
            centre = (box[m, :2] + box[m, 2:]) / 2
            allowed = np.hypot(*(points - centre).T) < radius * strides[:, 0]
        best = np.argsort(-align[m] * allowed, kind="stable")[:13]
        named[m, best] = allowed[best] & (mask[m] > 0)
    owner = settle(named, overlap)
    score = np.zeros(len(owner))
    for m in range(len(box)):
        mine = owner == m
        if mine.any():
            score[mine] = align[m, mine] / (align[m, mine].max() + 1e-9) * overlap[m, mine].max()
    return owner, score


def planes(slots: Assignment, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Owner [B, N] (-1 none) and soft label [B, N]; a prediction may be taken only once."""
    image, slot = np.nonzero(slots.is_positive_BS.numpy())
    anchor = slots.anchor_BS.numpy()[image, slot]
    assert len({*zip(image, anchor)}) == len(anchor)
    owner = np.full((slots.anchor_BS.shape[0], count), -1)
    score = np.zeros(owner.shape)
    owner[image, anchor] = slots.box_BS.numpy()[image, slot]
    score[image, anchor] = slots.score_BS.numpy()[image, slot]
    assert not slots.score_BS.numpy()[slots.is_positive_BS.numpy() == 0].any()
    return owner, score


def batch(truths: list[tuple]) -> list[paddle.Tensor]:
    return [paddle.to_tensor(np.stack(parts)) for parts in zip(*truths)]


# 3 boxes: fewer slots than predictions; 60: more (each names 27 or 13 of 420).
# With seeds 5 and 6 the deviation over K and over K - 1 choose other cells.
@pytest.mark.parametrize(
    ("boxes", "real", "seed"),
    [(3, (3, 2), 0), (12, (12, 0), 0), (60, (60, 41), 0), (12, (12, 12), 5)],
)
def test_atss_equals_loops_over_its_definition(
    boxes: int, real: tuple[int, int], seed: int
) -> None:
    points, strides = cells()
    truths = [random_truth(boxes, n, seed + at) for at, n in enumerate(real)]
    box, _, mask = batch(truths)
    slots = atss_assigner(
        box, mask, SIZES, STRIDES, paddle.to_tensor(points), paddle.to_tensor(strides), topk=9
    )
    assert slots.anchor_BS.shape[1] == min(boxes * 27, 420)
    owner, score = planes(slots, 420)
    for i, (box_M4, _, mask_M) in enumerate(truths):
        want = atss_by_loops(box_M4, mask_M)
        assert np.array_equal(owner[i], want)
        assert np.array_equal(score[i], want >= 0)
    assert (owner >= 0).any()


@pytest.mark.parametrize("radius", [None, 2.0])
@pytest.mark.parametrize(("boxes", "real"), [(3, (3, 2)), (12, (12, 0)), (60, (60, 41))])
def test_task_alignment_equals_loops_over_its_definition(
    boxes: int, real: tuple[int, int], radius: float | None
) -> None:
    points, strides = cells()
    rng = np.random.default_rng(7)
    reach = rng.uniform(0.5, 4, (2, 420, 4)).astype("float32") * strides
    pred = np.concatenate([points - reach[..., :2], points + reach[..., 2:]], -1)
    scores = rng.uniform(0.01, 1, (2, CLASSES, 420)).astype("float32")
    truths = [random_truth(boxes, n, seed) for seed, n in enumerate(real)]
    slots = task_aligned_assigner(
        *(paddle.to_tensor(x) for x in (scores, pred, points)),
        *batch(truths),
        **TAL,
        reach_N1=None if radius is None else paddle.to_tensor(strides * radius),
    )
    owner, score = planes(slots, 420)
    for i, truth in enumerate(truths):
        want_owner, want_score = tal_by_loops(scores[i], pred[i], *truth, radius)
        # Zero-aligned candidates are a tie among predictions that do not overlap: no soft label.
        real_N = want_score > 1e-6
        assert np.array_equal(owner[i][real_N], want_owner[real_N])
        np.testing.assert_allclose(score[i], want_score, atol=1e-5)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    points, _ = cells()
    rng = np.random.default_rng(3)
    low = rng.uniform(0, 100, (2, 420, 2))
    pred = np.concatenate([low, low + rng.uniform(5, 60, (2, 420, 2))], -1).astype("float32")
    scores = rng.uniform(0, 1, (2, CLASSES, 420)).astype("float32")
    truth = batch([random_truth(9, 9, 1), random_truth(9, 5, 2)])
    tensors = [paddle.to_tensor(x) for x in (scores, pred, points)]
    whole = task_aligned_assigner(*tensors, *truth, **TAL, reach_N1=None)
    monkeypatch.setattr("ppdist.losses.assigners.CHUNK", 2 * 420 * 2)
    for a, b in zip(whole, task_aligned_assigner(*tensors, *truth, **TAL, reach_N1=None)):
        assert np.array_equal(a.numpy(), b.numpy())


@pytest.mark.parametrize("topk", [1, 4, 9, 12])
def test_the_window_holds_the_nearest_cells_of_any_grid(topk: int) -> None:
    rng = np.random.default_rng(topk)
    for _ in range(40):
        height, width = (int(n) for n in rng.integers(1, 14, 2))
        centre = rng.uniform(0, 1, (1, 8, 2)) * [width * 8, height * 8]
        centre[0, :3] = [[0.1, 0.2], [width * 8 - 0.1, 0.3], [width * 4.1, height * 8 - 0.2]]
        box = np.concatenate([centre - 3, centre + 3], -1).astype("float32")
        got = nearest_cells(paddle.to_tensor(box), [(height, width)], (8,), topk).numpy()[0]
        y, x = np.divmod(np.arange(height * width), width)
        for m in range(8):
            far = np.hypot((x + 0.5) * 8 - centre[0, m, 0], (y + 0.5) * 8 - centre[0, m, 1])
            nearest = np.sort(far)[: min(topk, height * width)]
            assert len(set(got[m])) == len(nearest)
            np.testing.assert_allclose(np.sort(far[got[m]]), nearest, rtol=1e-4)


CROWD = """
import resource, numpy as np, paddle
from ppdist.losses.ppyoloe import PPYOLOELoss, PPYOLOELossConfig
from ppdist.models.ppyoloe import PPYOLOEOutputs
levels = (20, 40, 80)
def outputs(boxes):
    maps = [tuple(paddle.randn([1, c, s, s]) for s in levels) for c in (80, 68)]
    for x in sum(maps, ()): x.stop_gradient = False
    low = paddle.rand([1, boxes, 2]) * 500
    truth = (paddle.concat([low, low + 5 + paddle.rand([1, boxes, 2]) * 100], -1),
             paddle.randint(0, 80, [1, boxes]), paddle.ones([1, boxes]))
    return PPYOLOEOutputs(*maps), truth
def run(boxes, static_steps):
    loss = PPYOLOELoss(PPYOLOELossConfig(), num_classes=80, static_steps=static_steps)
    raw, truth = outputs(boxes)
    loss(raw, *truth, 0).total.backward()
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
for phase in (1, 0): run(4, phase)
before = peak()
for phase in (1, 0): run(500, phase)
print(peak() - before)
"""


@pytest.mark.slow
def test_assigner_memory_bounded_on_crowded_image() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CROWD], capture_output=True, text=True, timeout=600, check=True
    )
    plane = 500 * 8400 * 4 / 2**20  # MiB; with classes it would be 80 of them
    assert float(done.stdout.splitlines()[-1]) < 20 * plane
