"""The detector and its loss: learned queries look at the features of an image."""

from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from ppdist.losses.base import NOMINAL_BATCH, Loss, LossOutput
from ppdist.models.base import Backbone, Detector, Targets
from ppdist.models.layers import ConvBNLayer
from queries import QueriesConfig, QueriesLossConfig

WIDTH = 16


class Pyramid(Backbone):
    """A convolution a level; the pixels are seen by one that is made after another."""

    finest, coarsest = 3, (5,)
    strides, channels = (8, 16, 32), (WIDTH,) * 3
    stage_keys = (("stem",), ("levels",))

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.LayerList([ConvBNLayer(WIDTH, WIDTH, 3, stride=2) for _ in "1234"])
        self.stem = ConvBNLayer(3, WIDTH, 3, stride=2)

    @property
    def first_convolution(self) -> nn.Conv2D:
        return self.stem.conv

    def forward(self, images_B3HW: Tensor) -> list[Tensor]:
        features = [self.stem(images_B3HW)]
        for level in self.levels:
            features.append(level(features[-1]))
        return features[2:]


class Queries(Detector):
    """A query attends to all cells and says a class and a box.

    In training, boxes of the ground truth with noise are further queries, which are to find them.
    """

    needs_nms = False
    takes_targets = True
    neck_keys = ("encoder.",)
    class_layers = ("classes.", "labels.")

    def __init__(self, config: QueriesConfig) -> None:
        super().__init__(
            config.num_classes,
            strides=(),
            pixel_mean=(0.0, 0.0, 0.0),
            pixel_std=(255.0, 255.0, 255.0),
            size_multiple=32,
        )
        self.noise = config.noise
        self.backbone = Pyramid()
        self.encoder = nn.LayerList([nn.Linear(c, WIDTH) for c in self.backbone.channels])
        self.queries = nn.Embedding(config.queries, WIDTH)
        self.labels = nn.Embedding(config.num_classes, WIDTH)
        self.places = nn.Linear(4, WIDTH)
        self.attends = nn.Linear(WIDTH, WIDTH)
        self.classes, self.boxes = nn.Linear(WIDTH, config.num_classes), nn.Linear(WIDTH, 4)

    def forward(self, images_B3HW: Tensor, targets: Targets | None = None) -> dict[str, Any]:
        """logits_BQC, boxes_BQ4 (cx cy w h in 0..1), size_4 (w h w h in pixels), denoised_BM4."""
        features = self.backbone(images_B3HW)
        tokens = [
            layer(x.flatten(2).transpose([0, 2, 1])) for layer, x in zip(self.encoder, features)
        ]
        tokens_BND = paddle.concat(tokens, axis=1)
        height, width = paddle.shape(images_B3HW)[2], paddle.shape(images_B3HW)[3]
        size_4 = paddle.stack([width, height, width, height]).astype("float32")
        found_BQD = self.look(tokens_BND, self.queries.weight.unsqueeze(0))
        outputs = {
            "logits_BQC": self.classes(found_BQD),
            "boxes_BQ4": F.sigmoid(self.boxes(found_BQD)),
            "size_4": size_4,
        }
        if targets is not None:
            noise = [
                np.random.default_rng(seed).normal(0, self.noise, targets.boxes_BM4.shape[1:])
                for seed in targets.seeds_B
            ]
            shifted_BM4 = targets.boxes_BM4 / size_4 + paddle.to_tensor(np.stack(noise), "float32")
            query_BMD = self.places(shifted_BM4) + self.labels(targets.labels_BM)
            outputs["denoised_BM4"] = F.sigmoid(self.boxes(self.look(tokens_BND, query_BMD)))
        return outputs

    def look(self, tokens_BND: Tensor, queries_BQD: Tensor) -> Tensor:
        share_BQN = F.softmax(self.attends(queries_BQD) @ tokens_BND.transpose([0, 2, 1]), -1)
        return queries_BQD + share_BQN @ tokens_BND

    def decode(self, outputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        centre_BQ2, side_BQ2 = outputs["boxes_BQ4"].split([2, 2], axis=-1)
        corners = [centre_BQ2 - side_BQ2 / 2, centre_BQ2 + side_BQ2 / 2]
        boxes_BQ4 = paddle.concat(corners, axis=-1) * outputs["size_4"]
        return F.sigmoid(outputs["logits_BQC"]), boxes_BQ4


class QueriesLoss(Loss):
    """Each object in turn is learned by the nearest query that is left."""

    @classmethod
    def build(
        cls,
        config: QueriesLossConfig,
        model: Queries,
        steps_per_epoch: float,
        reference_batch: int = NOMINAL_BATCH,
    ) -> "QueriesLoss":
        return cls()

    def forward(
        self,
        outputs: dict[str, Any],
        boxes_BM4: Tensor,
        labels_BM: Tensor,
        mask_BM: Tensor,
        step: int,
        global_normalizers: Tensor | None = None,
    ) -> LossOutput:
        corners_BM4 = boxes_BM4 / outputs["size_4"]
        low_BM2, high_BM2 = corners_BM4.split([2, 2], axis=-1)
        wanted_BM4 = paddle.concat([(low_BM2 + high_BM2) / 2, high_BM2 - low_BM2], axis=-1)
        found_BQ4, logits_BQC = (
            outputs[name].astype("float32") for name in ("boxes_BQ4", "logits_BQC")
        )
        apart_BMQ = (wanted_BM4.unsqueeze(2) - found_BQ4.detach().unsqueeze(1)).abs().sum(-1)
        query_BM, used_BM = map(paddle.to_tensor, matched(apart_BMQ.numpy(), mask_BM.numpy()))

        own_BM4 = paddle.take_along_axis(found_BQ4, query_BM.unsqueeze(-1).expand([-1, -1, 4]), 1)
        boxes = ((own_BM4 - wanted_BM4).abs().sum(-1) * used_BM).sum()
        is_of_BMQ = F.one_hot(query_BM, found_BQ4.shape[1]) * used_BM.unsqueeze(-1)
        true_BQC = is_of_BMQ.transpose([0, 2, 1]) @ F.one_hot(labels_BM, logits_BQC.shape[2])
        classes = F.binary_cross_entropy_with_logits(logits_BQC, true_BQC, reduction="sum")
        total, parts = classes + 5 * boxes, {"loss_cls": classes, "loss_box": boxes}
        if "denoised_BM4" in outputs:  # not of an evaluation
            off_BM = (outputs["denoised_BM4"].astype("float32") - wanted_BM4).abs().sum(-1)
            parts["loss_denoising"] = (off_BM * mask_BM).sum()
            total = total + 5 * parts["loss_denoising"]
        parts = {name: part.detach() for name, part in parts.items()}
        return LossOutput(total, mask_BM.sum(), parts)


def matched(apart_BMQ: np.ndarray, mask_BM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The query of each object, and whether it has one."""
    query_BM = np.zeros(mask_BM.shape, np.int64)
    used_BM = np.zeros(mask_BM.shape, np.float32)
    for image, (apart_MQ, mask_M) in enumerate(zip(apart_BMQ, mask_BM)):
        for row in np.flatnonzero(mask_M)[: apart_MQ.shape[1]]:
            query = apart_MQ[row].argmin()
            apart_MQ[:, query] = np.inf
            query_BM[image, row], used_BM[image, row] = query, 1
    return query_BM, used_BM
