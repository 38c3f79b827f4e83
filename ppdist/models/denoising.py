"""Contrastive denoising: noisy ground truth as queries of a decoder.

A group contains each box of an image twice: once slightly shifted, to be recovered, and once
shifted farther, to be recognised as no object. A query attends to its own group and to the queries
that the encoder selected, never to another group.
Source: DINO, arXiv:2203.03605, section 3.3; labels and attention mask: DN-DETR, arXiv:2203.01305.
"""

from typing import NamedTuple

import numpy as np
import paddle
from paddle import Tensor

from ppdist.models.attention import HIDDEN
from ppdist.models.base import Targets

LABEL_NOISE = 0.25  # probability of a random class for a query (half the original's ratio 0.5)
_DRAWS = 10  # numbers for each query: label drawn?, label, and for each side how far and where to


class NoisyQueries(NamedTuple):
    """Denoising queries: the decoder's input, and the box that each query stands for.

    labels_BD: int64, class assigned to the query; 0 where the query is not used.
    boxes_BD4: cx, cy, w, h as fractions (0..1) of the input size.
    group_BD: int64, number of the query's group; a unique number where it is not used.
    target_BD, positive_BD, negative_BD, groups_B: see `Denoised`.
    """

    labels_BD: Tensor
    boxes_BD4: Tensor
    group_BD: Tensor
    target_BD: Tensor
    positive_BD: Tensor
    negative_BD: Tensor
    groups_B: Tensor

    @property
    def used_BD(self) -> Tensor:
        """Returns float32, 1 where the query is used."""
        return self.positive_BD + self.negative_BD


class DenoisingQueries:
    """Builder of denoising queries from targets.

        groups of an image with n boxes: max(1, denoising // n), each n near and n far queries

    Nothing depends on the other images of a micro-batch: groups are counted for each image (the
    originals take the largest count of the batch), the noise is drawn from the image's own seed,
    and queries that an image does not use are hidden.  Their number leaves room for every image
    with up to `denoising` boxes, so that it is known without looking at the targets.
    """

    def __init__(self, num_classes: int, denoising: int) -> None:
        self.num_classes, self.denoising = num_classes, denoising

    @paddle.no_grad()
    def __call__(self, targets: Targets, size_4: Tensor) -> NoisyQueries:
        """Builds the queries of a micro-batch.

        Args: size_4: width, height, width, height of the input, pixels.
        """
        max_boxes = targets.boxes_BM4.shape[1]
        slots = 2 * max(self.denoising, max_boxes)
        # A slot is one query: group by group, and within a group the near queries before the far
        # ones.
        count_B1 = targets.mask_BM.astype("int64").sum(axis=1, keepdim=True)
        at_least_B1 = count_B1.clip(min=1)
        groups_B1 = (self.denoising // at_least_B1).clip(min=1)
        slot_D = paddle.arange(slots, dtype="int64")
        group_BD, place_BD = slot_D // (2 * at_least_B1), slot_D % (2 * at_least_B1)
        used_BD = slot_D < 2 * groups_B1 * count_B1
        near_BD = place_BD < at_least_B1
        target_BD = place_BD % at_least_B1
        noise_BDK = paddle.to_tensor(_noise(targets.seeds_B, slots))

        true_BD = paddle.take_along_axis(targets.labels_BM.astype("int64"), target_BD, axis=1)
        random_BD = (noise_BDK[:, :, 1] * self.num_classes).astype("int64")
        labels_BD = paddle.where(noise_BDK[:, :, 0] < LABEL_NOISE, random_BD, true_BD)
        labels_BD = paddle.where(used_BD, labels_BD, paddle.zeros_like(labels_BD))

        index_BD4 = target_BD.unsqueeze(-1).expand([-1, -1, 4])
        box_BD4 = paddle.take_along_axis(targets.boxes_BM4 / size_4, index_BD4, axis=1)
        half_BD2 = (box_BD4[:, :, 2:] - box_BD4[:, :, :2]) / 2
        # Sides of a near box move by less than half the box's size, sides of a far one by more.
        move_BD4 = noise_BDK[:, :, 2:6] + (~near_BD).astype("float32").unsqueeze(-1)
        sign_BD4 = paddle.where(noise_BDK[:, :, 6:] < 0.5, -1.0, 1.0)
        box_BD4 = box_BD4 + move_BD4 * sign_BD4 * paddle.concat([half_BD2, half_BD2], axis=-1)
        low_BD2, high_BD2 = box_BD4.clip(0.0, 1.0).chunk(2, axis=-1)
        # abs: sides may have swapped places (as in D-FINE; RT-DETR shrinks such boxes to nothing).
        box_BD4 = paddle.concat([(low_BD2 + high_BD2) / 2, (high_BD2 - low_BD2).abs()], axis=-1)
        return NoisyQueries(
            labels_BD,
            box_BD4,
            paddle.where(used_BD, group_BD, -1 - slot_D),
            target_BD,
            (used_BD & near_BD).astype("float32"),
            (used_BD & ~near_BD).astype("float32"),
            groups_B1.squeeze(1).astype("float32"),
        )


def _noise(seeds_B: np.ndarray, slots: int) -> np.ndarray:
    """Draws the noise of all queries: [B, slots, _DRAWS] in 0..1, float32.

    The numbers of a slot do not depend on the number of slots.
    """
    draws = [np.random.default_rng(int(seed)).random((slots, _DRAWS)) for seed in seeds_B]
    return np.stack(draws).astype("float32")


def attention_bias(group_BD: Tensor, queries: int) -> Tensor:
    """Builds the bias of the denoising queries' logits, [B, 1, D, D + Q] for `MultiHeadAttention`.

    It is 0 where a query may attend, HIDDEN elsewhere.

    Args: queries: Q, number of the encoder's queries, which follow the denoising queries.
    """
    batch, slots = group_BD.shape
    same_group_BDD = (group_BD.unsqueeze(2) == group_BD.unsqueeze(1)).astype("float32")
    denoising_BDD = (1 - same_group_BDD) * HIDDEN
    encoder_BDQ = paddle.zeros([batch, slots, queries])
    return paddle.concat([denoising_BDD, encoder_BDQ], axis=2).unsqueeze(1)
