"""PP-YOLOE of tiny width in numpy: forward pass, decoding, both assignments, loss."""

from itertools import pairwise

import numpy as np

from tests.reference.formulas import CLASSES
from tests.reference.layers import Net, bce, iou, max_pool, mean, sigmoid, silu, twice

WIDTH, DEPTH = 0.125, 0.33
STRIDES = (32, 16, 8)
BINS = 17


class Layers(Net):
    """Blocks of PP-YOLOE by the original's keys; `plus`: a learned scale on 1x1 branches."""

    def __init__(self, training: bool, plus: bool) -> None:
        super().__init__(training, 1e-5, "_mean", "_variance")
        self.plus = plus

    def rep_block(self, x: np.ndarray, key: str, residual: bool) -> np.ndarray:
        size = x.shape[1]
        y = self.conv_norm(x, f"{key}.conv1", size, 3)
        side = self.plain_conv_norm(y, f"{key}.conv2.conv2", size, 1)
        if residual and self.plus:
            side = self.get(f"{key}.conv2.alpha", 1) * side
        y = silu(self.plain_conv_norm(y, f"{key}.conv2.conv1", size, 3) + side)
        return x + y if residual else y

    def stage(self, x: np.ndarray, key: str, out: int, blocks: int) -> np.ndarray:
        middle = (x.shape[1] + out) // 2
        x = self.conv_norm(x, f"{key}.conv_down", middle, 3, 2)
        y = self.conv_norm(x, f"{key}.conv2", middle // 2)
        for i in range(blocks):
            y = self.rep_block(y, f"{key}.blocks.{i}", True)
        x = np.concatenate([self.conv_norm(x, f"{key}.conv1", middle // 2), y], axis=1)
        gate = self.biased(mean(x), f"{key}.attn.fc", x.shape[1])
        return self.conv_norm(x * (gate / 6 + 0.5).clip(0, 1), f"{key}.conv3", out)

    def neck_stage(self, x: np.ndarray, key: str, out: int, pooled: bool = False) -> np.ndarray:
        half = out // 2
        y = self.rep_block(self.conv_norm(x, f"{key}.conv2", half), f"{key}.convs.0", False)
        if pooled:
            maps = [y, *(max_pool(y, size) for size in (5, 9, 13))]
            y = self.conv_norm(np.concatenate(maps, axis=1), f"{key}.convs.spp.conv", half)
        beside = self.conv_norm(x, f"{key}.conv1", half)
        return self.conv_norm(np.concatenate([beside, y], axis=1), f"{key}.conv3", out)

    def task(self, x: np.ndarray, key: str) -> np.ndarray:
        gate = sigmoid(self.biased(mean(x), f"{key}.fc", x.shape[1]))
        return self.conv_norm(x * gate, f"{key}.conv", x.shape[1])


def detector(net: Layers, images: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Class and side logits [B, C, H, W], [B, 4 * BINS, H, W] of strides 32, 16, 8."""
    widths = [round(c * WIDTH) for c in (64, 128, 256, 512, 1024)]
    x, stem = images.astype("float64"), "backbone.stem.conv"
    for i, (out, stride) in enumerate([(widths[0] // 2, 2), (widths[0] // 2, 1), (widths[0], 1)]):
        x = net.conv_norm(x, f"{stem}{i + 1}", out, 3, stride)
    features = []
    for i, blocks in enumerate((3, 6, 6, 3)):
        x = net.stage(x, f"backbone.stages.{i}", widths[i + 1], max(round(blocks * DEPTH), 1))
        features.append(x)
    c8, c16, c32 = features[1:]

    out = [round(c * WIDTH) for c in (768, 384, 192)]
    f32 = net.neck_stage(c32, "neck.fpn_stages.0.0", out[0], pooled=True)
    up = twice(net.conv_norm(f32, "neck.fpn_routes.0", out[0] // 2))
    f16 = net.neck_stage(np.concatenate([up, c16], 1), "neck.fpn_stages.1.0", out[1])
    up = twice(net.conv_norm(f16, "neck.fpn_routes.1", out[1] // 2))
    p8 = net.neck_stage(np.concatenate([up, c8], 1), "neck.fpn_stages.2.0", out[2])
    down = net.conv_norm(p8, "neck.pan_routes.1", out[2], 3, 2)
    p16 = net.neck_stage(np.concatenate([down, f16], 1), "neck.pan_stages.1.0", out[1])
    down = net.conv_norm(p16, "neck.pan_routes.0", out[1], 3, 2)
    p32 = net.neck_stage(np.concatenate([down, f32], 1), "neck.pan_stages.0.0", out[0])

    maps = []
    for i, feature in enumerate((p32, p16, p8)):
        classes = net.task(feature, f"yolo_head.stem_cls.{i}") + feature
        sides = net.task(feature, f"yolo_head.stem_reg.{i}")
        maps.append(
            (
                net.biased(classes, f"yolo_head.pred_cls.{i}", CLASSES, 3),
                net.biased(sides, f"yolo_head.pred_reg.{i}", 4 * BINS, 3),
            )
        )
    return maps


def cells(maps: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Centres [N, 2] in pixels and strides [N]."""
    points, strides = [], []
    for stride, (logits, _) in zip(STRIDES, maps):
        height, width = logits.shape[2:]
        grid = np.stack(np.meshgrid(np.arange(width), np.arange(height)), -1).reshape(-1, 2)
        points.append((grid + 0.5) * stride)
        strides.append(np.full(height * width, stride))
    return np.concatenate(points), np.concatenate(strides)


def side_by_side(maps: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Class logits [B, N, C] and side logits [B, N, 4, BINS]."""
    logits, sides = (
        np.concatenate([x.reshape(*x.shape[:2], -1) for x in kind], axis=2).transpose(0, 2, 1)
        for kind in zip(*maps)
    )
    return logits, sides.reshape(*sides.shape[:2], 4, BINS)


def decode(maps: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """scores [B, N, C] and xyxy boxes [B, N, 4] in pixels."""
    logits, sides = side_by_side(maps)
    points, strides = cells(maps)
    chance = np.exp(sides) / np.exp(sides).sum(-1, keepdims=True)
    length = chance @ np.arange(BINS) * strides[:, None]
    return sigmoid(logits), np.concatenate([points - length[..., :2], points + length[..., 2:]], -1)


def loss(maps: list, targets: dict[str, np.ndarray], phase: str) -> dict[str, float]:
    """The three parts and the sum of soft labels they are divided by (at least 1)."""
    logits, sides = side_by_side(maps)
    scores, boxes = decode(maps)
    points, strides = cells(maps)
    classes = giou_term = dfl = total = 0.0
    for image in range(len(logits)):
        real = targets["pad_gt_mask"][image, :, 0] > 0
        truth = targets["gt_bbox"][image][real].astype("float64")
        labels = targets["gt_class"][image][real, 0]
        if phase == "atss":
            owner = atss(truth, points, strides, [x.shape[2] * x.shape[3] for x, _ in maps])
            soft = np.where(owner >= 0, iou(truth[owner], boxes[image]), 0) if len(truth) else None
        else:
            owner, soft = tal(truth, labels, points, scores[image], boxes[image])
        q = np.zeros(logits[image].shape)
        chosen = np.flatnonzero(owner >= 0)
        if len(chosen):
            q[chosen, labels[owner[chosen]]] = soft[chosen]
        taken = np.zeros(q.shape, bool)
        taken[chosen, labels[owner[chosen]]] = True
        weight = np.where(taken, q, 0.75 * sigmoid(logits[image]) ** 2)
        classes += float((weight * bce(logits[image], q)).sum())
        for cell in chosen:
            wanted, stride = truth[owner[cell]], strides[cell]
            giou_term += soft[cell] * (1 - giou(boxes[image, cell] / stride, wanted / stride))
            outward = (
                np.concatenate([points[cell] - wanted[:2], wanted[2:] - points[cell]]) / stride
            )
            dfl += soft[cell] * distribution(sides[image, cell], outward.clip(0, BINS - 1.01))
            total += soft[cell]
    divisor = max(1.0, total)
    parts = {"loss_cls": classes, "loss_iou": giou_term, "loss_dfl": dfl}
    return {"score_sum": total, **{name: part / divisor for name, part in parts.items()}}


def atss(
    truth: np.ndarray, points: np.ndarray, strides: np.ndarray, sizes: list[int]
) -> np.ndarray:
    """The object [N] each prediction learns, or -1; arXiv:1912.02424, squares of 5 strides."""
    if not len(truth):
        return np.full(len(points), -1)
    half = 2.5 * strides[:, None]
    overlap = iou(truth[:, None], np.concatenate([points - half, points + half], 1)[None])
    named = np.zeros(overlap.shape, bool)
    starts = np.cumsum([0, *sizes])
    for m, box in enumerate(truth):
        distance = np.linalg.norm(points - (box[:2] + box[2:]) / 2, axis=1)
        nearest = np.concatenate(
            [a + np.argsort(distance[a:b], kind="stable")[:9] for a, b in pairwise(starts)]
        )
        threshold = overlap[m, nearest].mean() + overlap[m, nearest].std(ddof=1)
        good = nearest[overlap[m, nearest] > threshold]
        named[m, good] = inside(points[good], box)
    return settle(named, overlap)


def tal(
    truth: np.ndarray, labels: np.ndarray, points: np.ndarray, scores: np.ndarray, boxes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The object each prediction learns, or -1, and its soft label; arXiv:2108.07755."""
    soft = np.zeros(len(points))
    if not len(truth):
        return np.full(len(points), -1), soft
    overlap = iou(truth[:, None], boxes[None])
    align = scores.T[labels] * overlap**6
    named = np.zeros(overlap.shape, bool)
    for m, box in enumerate(truth):
        best = np.argsort(-align[m] * inside(points, box), kind="stable")[:13]
        named[m, best] = inside(points[best], box)
    owner = settle(named, overlap)
    for m in range(len(truth)):
        mine = owner == m
        if mine.any():
            rescale = overlap[m, mine].max() / (align[m, mine].max() + 1e-9)
            soft[mine] = align[m, mine] * rescale
    return owner, soft


def inside(points: np.ndarray, box: np.ndarray) -> np.ndarray:
    return ((points > box[:2] + 1e-9) & (points < box[2:] - 1e-9)).all(1)


def settle(named: np.ndarray, overlap: np.ndarray) -> np.ndarray:
    """One named by several objects learns the one it overlaps most, among all."""
    best = np.where(named.sum(0) > 1, overlap.argmax(0), named.argmax(0))
    return np.where(named.any(0), best, -1)


def giou(a: np.ndarray, b: np.ndarray) -> float:
    low, high = np.minimum(a[:2], b[:2]), np.maximum(a[2:], b[2:])
    hull = (high - low).prod()
    common = (np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])).clip(0).prod()
    union = (a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - common
    return float(common / union - (hull - union) / hull)


def distribution(logits_4R: np.ndarray, length_4: np.ndarray) -> float:
    """Cross entropy with the two whole lengths beside the true one, mean of the sides."""
    log_p = logits_4R - np.log(np.exp(logits_4R).sum(-1, keepdims=True))
    low = np.floor(length_4).astype(int)
    side = np.arange(4)
    near, far = log_p[side, low], log_p[side, low + 1]
    return float(-((low + 1 - length_4) * near + (length_4 - low) * far).mean())
