"""YOLOv5 of tiny width in numpy: the rows of the original, decoding, loss, classifier."""

import math

import numpy as np

from tests.reference.formulas import CLASSES
from tests.reference.layers import Net, bce, iou, max_pool, mean, sigmoid, twice

WIDTH, DEPTH = 0.125, 0.33
BASES = {3: (256, 512, 1024), 4: (256, 512, 768, 1024)}  # channels at width 1 of the levels
ANCHORS = {
    3: [[(10, 13), (16, 30), (33, 23)], [(30, 61), (62, 45), (59, 119)],
        [(116, 90), (156, 198), (373, 326)]],
    4: [[(19, 27), (44, 40), (38, 94)], [(96, 68), (86, 152), (180, 137)],
        [(140, 301), (303, 264), (238, 542)], [(436, 615), (739, 380), (925, 792)]],
}  # fmt: skip
BALANCE = {3: (4.0, 1.0, 0.4), 4: (4.0, 1.0, 0.25, 0.06)}


def channels(base: int) -> int:
    return math.ceil(base * WIDTH / 8) * 8


class Rows(Net):
    """Counts the rows of the original as its layers are applied."""

    def __init__(self, training: bool) -> None:
        super().__init__(training, 1e-3, "running_mean", "running_var")
        self.row = -1

    def next(self) -> str:
        self.row += 1
        return f"model.{self.row}"

    def conv_row(self, x: np.ndarray, base: int, kernel: int = 1, stride: int = 1) -> np.ndarray:
        padding = 2 if kernel == 6 else kernel // 2
        return self.conv_norm(x, self.next(), channels(base), kernel, stride, padding)

    def c3_row(self, x: np.ndarray, base: int, repeats: int, residual: bool) -> np.ndarray:
        key, half = self.next(), channels(base) // 2
        inner = self.conv_norm(x, f"{key}.cv1", half)
        for i in range(max(round(repeats * DEPTH), 1)):
            y = self.conv_norm(inner, f"{key}.m.{i}.cv1", half)
            y = self.conv_norm(y, f"{key}.m.{i}.cv2", half, 3)
            inner = inner + y if residual else y
        both = np.concatenate([inner, self.conv_norm(x, f"{key}.cv2", half)], axis=1)
        return self.conv_norm(both, f"{key}.cv3", 2 * half)

    def sppf_row(self, x: np.ndarray, base: int) -> np.ndarray:
        key = self.next()
        maps = [self.conv_norm(x, f"{key}.cv1", channels(base) // 2)]
        for _ in range(3):
            maps.append(max_pool(maps[-1], 5))
        return self.conv_norm(np.concatenate(maps, axis=1), f"{key}.cv2", channels(base))


def trunk(net: Rows, images: np.ndarray, bases: tuple[int, ...]) -> list[np.ndarray]:
    """Stages of stride 8 and up, before the pooling."""
    x = net.conv_row(images, 64, 6, 2)
    kept = []
    for base, repeats in zip((128, *bases), (3, 6, 9, 3, 3)):
        x = net.c3_row(net.conv_row(x, base, 3, 2), base, repeats, True)
        kept.append(x)
    return kept[1:]


def detector(net: Rows, images: np.ndarray, levels: int) -> list[np.ndarray]:
    """Raw maps [B, 3 * (5 + C), H, W], strides rising."""
    bases = BASES[levels]
    features = trunk(net, images.astype("float64"), bases)
    x = net.sppf_row(features[-1], bases[-1])
    waiting = []
    for level in range(levels - 2, -1, -1):
        x = net.conv_row(x, bases[level])
        waiting.append(x)
        net.row += 2  # up-sampling, concatenation
        x = net.c3_row(np.concatenate([twice(x), features[level]], 1), bases[level], 3, False)
    outputs = [x]
    for level in range(1, levels):
        x = net.conv_row(x, bases[level - 1], 3, 2)
        net.row += 1
        x = net.c3_row(np.concatenate([x, waiting.pop()], 1), bases[level], 3, False)
        outputs.append(x)
    key = net.next()
    return [net.biased(x, f"{key}.m.{i}", 3 * (5 + CLASSES)) for i, x in enumerate(outputs)]


def classifier(net: Rows, images: np.ndarray) -> np.ndarray:
    """Logits [B, C]; the new head has a norm of another kind."""
    x = trunk(net, images.astype("float64"), BASES[3])[-1]
    key = net.next()
    net.epsilon = 1e-5
    x = mean(net.conv_norm(x, f"{key}.conv", 1280))[:, :, 0, 0]
    weight = net.get(f"{key}.linear.weight", CLASSES, 1280)
    return x @ weight.T + net.get(f"{key}.linear.bias", CLASSES)


def decode(maps: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """scores [B, N, C] and xyxy boxes [B, N, 4] in pixels."""
    scores, boxes = [], []
    for level, raw in enumerate(maps):
        batch, _, height, width = raw.shape
        s = sigmoid(raw).reshape(batch, 3, 5 + CLASSES, height, width).transpose(0, 1, 3, 4, 2)
        stride, anchors = 8 * 2**level, np.array(ANCHORS[len(maps)][level]).reshape(3, 1, 1, 2)
        cell = np.stack(np.meshgrid(np.arange(width), np.arange(height)), -1)
        centre, size = (2 * s[..., :2] - 0.5 + cell) * stride, (2 * s[..., 2:4]) ** 2 * anchors
        box = np.concatenate([centre - size / 2, centre + size / 2], -1)
        boxes.append(box.reshape(batch, -1, 4))
        scores.append((s[..., 4:5] * s[..., 5:]).reshape(batch, -1, CLASSES))
    return np.concatenate(scores, 1), np.concatenate(boxes, 1)


def loss(maps: list[np.ndarray], targets: dict[str, np.ndarray]) -> dict[str, float]:
    """Box, objectness and class term, gains included; their sum is the loss per image."""
    levels = len(maps)
    total = {"loss_box": 0.0, "loss_obj": 0.0, "loss_cls": 0.0}
    for level, raw in enumerate(maps):
        batch, _, height, width = raw.shape
        raw = raw.reshape(batch, 3, 5 + CLASSES, height, width)
        wanted = np.zeros((batch, 3, height, width))  # objectness
        boxes, classes = [], []
        stride, priors = 8 * 2**level, ANCHORS[levels][level]
        found = matches(priors, stride, (height, width), targets)
        for image, anchor, row, column, box, label in found:
            x = raw[image, anchor, :, row, column]
            prior = np.array(priors[anchor]) / stride
            centre, size = 2 * sigmoid(x[:2]) - 0.5, (2 * sigmoid(x[2:4])) ** 2 * prior
            overlap = ciou(np.array([*centre, *size]), box - [column, row, 0, 0])
            wanted[image, anchor, row, column] = max(overlap, 0)
            boxes.append(1 - overlap)
            classes.append(bce(x[5:], np.arange(CLASSES) == label).mean())
        if boxes:
            total["loss_box"] += float(np.mean(boxes))
            total["loss_cls"] += float(np.mean(classes))
        total["loss_obj"] += BALANCE[levels][level] * float(bce(raw[:, :, 4], wanted).mean())
    share = 3 / levels
    area = (max(maps[0].shape[2:]) * 8 / 640) ** 2
    gains = {"loss_box": 0.05, "loss_obj": area, "loss_cls": 0.5 * CLASSES / 80}
    return {name: value * gains[name] * share for name, value in total.items()}


def matches(
    priors: list[tuple[int, int]], stride: int, size: tuple[int, int], targets: dict
) -> list[tuple]:
    """(image, anchor, row, column, box (cx, cy, w, h) in cells, label), in the original's order.

    Own cells first, then left, upper, right and lower neighbours: a later one overwrites.
    """
    height, width = size
    found = []
    for side_x, side_y in ((0, 0), (-1, 0), (0, -1), (1, 0), (0, 1)):
        for anchor, prior in enumerate(priors):
            for image, slot in np.argwhere(targets["pad_gt_mask"][..., 0]):
                low, high = np.split(targets["gt_bbox"][image, slot].astype("float64") / stride, 2)
                box = np.concatenate([(low + high) / 2, high - low])
                x, y = box[:2]
                ratio = box[2:] * stride / prior
                if np.maximum(ratio, 1 / ratio).max() >= 4:
                    continue
                left, above = x % 1 < 0.5 and x > 1, y % 1 < 0.5 and y > 1
                right = (width - x) % 1 < 0.5 and width - x > 1
                below = (height - y) % 1 < 0.5 and height - y > 1
                near = {(0, 0): True, (-1, 0): left, (0, -1): above, (1, 0): right, (0, 1): below}
                if near[side_x, side_y]:
                    label = targets["gt_class"][image, slot, 0]
                    found.append((image, anchor, int(y) + side_y, int(x) + side_x, box, label))
    return found


def ciou(a: np.ndarray, b: np.ndarray) -> float:
    """Of two boxes (cx, cy, w, h); arXiv:1911.08287."""
    corners = [np.concatenate([x[:2] - x[2:] / 2, x[:2] + x[2:] / 2]) for x in (a, b)]
    overlap = float(iou(*corners))
    span = np.maximum(corners[0][2:], corners[1][2:]) - np.minimum(corners[0][:2], corners[1][:2])
    v = 4 / math.pi**2 * (math.atan(a[2] / a[3]) - math.atan(b[2] / b[3])) ** 2
    distance = ((a[:2] - b[:2]) ** 2).sum() / (span**2).sum()
    return overlap - distance - v * v / (1 - overlap + v) if v else overlap - distance
