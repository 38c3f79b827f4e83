"""Hungarian matching: each box gets the query with the lowest cost.

The assignment is solved on the host, by scipy.  So a loss that uses it waits for the forward pass,
once in a micro-batch: the costs of all layers are read at once.

Letters: L layers (outputs that are matched), B images, Q queries, M padded boxes, C classes.
"""

from typing import NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor

from ppdist.losses.boxes import aligned_giou, cxcywh_to_xyxy

ALPHA, GAMMA = 0.25, 2.0  # of the focal class cost, in all original recipes
IMPOSSIBLE = 1e6  # replaces costs that are not finite


class Costs(NamedTuple):
    """Weights of a matching cost."""

    classes: float
    l1: float
    giou: float


class Truth(NamedTuple):
    """Objects to be found.

    boxes_BM4: (centre x, centre y, width, height) in 0..1 of the input.
    labels_BM: int64, a valid class where padded, too.
    mask_BM: float32, 1 for a real box, 0 for padding.
    """

    boxes_BM4: Tensor
    labels_BM: Tensor
    mask_BM: Tensor


class Matching(NamedTuple):
    """The box that each query learns.

    box_LBQ: int64, row of the image's boxes; 0 where the query learns none.
    is_positive_LBQ: float32, 1 where the query learns a box, else 0.
    """

    box_LBQ: Tensor
    is_positive_LBQ: Tensor


@paddle.no_grad()
def matching_cost(
    logits_LBQC: Tensor, boxes_LBQ4: Tensor, size_4: Tensor, truth: Truth, costs: Costs
) -> Tensor:
    """Computes the cost of each box for each query: [L, B, Q, M] float32.

        cost = class * (a (1-p)^g * -log p - (1-a) p^g * -log(1-p)) + l1 * |b - b*|_1 - giou * GIoU

    p is the score of the box's class, a = 0.25, g = 2, and |.|_1 of (cx, cy, w, h) in 0..1.

    Args: size_4: width, height, width, height of the input in pixels.
    Source: Zhu et al. 2020, arXiv:2010.04159, appendix A.4 (the class cost); Carion et al. 2020,
        arXiv:2005.12872, equation 8 (L1 and GIoU).
    """
    eps = 1e-8
    layers, images, queries, _ = logits_LBQC.shape
    label_LBQM = truth.labels_BM.unsqueeze([0, 2]).expand([layers, images, queries, -1])
    score = F.sigmoid(logits_LBQC.take_along_axis(label_LBQM, 3))
    positive_cost = ALPHA * (1 - score) ** GAMMA * -(score + eps).log()
    negative_cost = (1 - ALPHA) * score**GAMMA * -(1 - score + eps).log()
    boxes_LBQ14, target_B1M4 = boxes_LBQ4.unsqueeze(3), truth.boxes_BM4.unsqueeze(1)
    pairs = zip(boxes_LBQ14.unbind(-1), target_B1M4.unbind(-1))
    l1 = paddle.add_n([(side - target_side).abs() for side, target_side in pairs])
    corners = (cxcywh_to_xyxy(boxes * size_4) for boxes in (boxes_LBQ14, target_B1M4))
    giou = aligned_giou(*corners)
    return costs.classes * (positive_cost - negative_cost) + costs.l1 * l1 - costs.giou * giou


@paddle.no_grad()
def hungarian_matcher(cost_LBQM: Tensor, mask_BM: Tensor) -> tuple[Matching, Matching]:
    """Solves the cheapest one-to-one matching of each layer, and their union.

    In the union a query learns the box that most layers assign to it; in a tie, the first box.

    It copies 4 * L * B * Q * M bytes to the host, once, and solves L * B assignments there.  Costs
    that are not finite count as IMPOSSIBLE, so that no rank raises an error alone: the loss is not
    finite either then, and the step is skipped on all ranks.

    Returns: L matchings; the union, L = 1.
    Source: Peng et al. 2024, arXiv:2410.13842, section 4.2 (the union).
    """
    from scipy.optimize import linear_sum_assignment  # slow to import; only this loss needs it

    layers, images, queries, boxes = cost_LBQM.shape
    # One copy to the host, because each copy waits for the device.
    host_values = paddle.concat([cost_LBQM.flatten(), mask_BM.astype("float32").flatten()]).numpy()
    cost_LBQM, mask_BM = np.split(host_values, [-images * boxes])
    cost_LBQM = cost_LBQM.reshape(layers, images, queries, boxes)
    cost_LBQM = np.where(np.isfinite(cost_LBQM), cost_LBQM, IMPOSSIBLE)
    votes_LBQM = np.zeros(cost_LBQM.shape, "int64")
    for image, mask_M in enumerate(mask_BM.reshape(images, boxes)):
        (real,) = mask_M.nonzero()
        for layer in range(layers):
            query, box = linear_sum_assignment(cost_LBQM[layer, image][:, real])
            votes_LBQM[layer, image, query, real[box]] = 1
    return _to_matching(votes_LBQM), _to_matching(votes_LBQM.sum(0, keepdims=True))


def _to_matching(votes_LBQM: np.ndarray) -> Matching:
    """Builds a matching from the number of layers that vote for each pair."""
    is_positive_LBQ = votes_LBQM.any(-1).astype("float32")
    return Matching(paddle.to_tensor(votes_LBQM.argmax(-1)), paddle.to_tensor(is_positive_LBQ))
