"""The models of the export matrix: trained by a run, or with random weights that do something."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import paddle
from paddle import nn

from ppdist.common.errors import ConfigError, DataError
from ppdist.config.experiment import load_config
from ppdist.data.datasets.build import read_split
from ppdist.data.datasets.synthetic import scene
from ppdist.data.image import is_image_name, read_image
from ppdist.distributed.paddle_api import set_momentum
from ppdist.engine.build import build_model
from ppdist.export.export import (
    Pictures,
    Sample,
    deployment_copy,
    prepare_input,
    select_readable,
    spread_evenly,
    take_sample,
)
from ppdist.export.predictor import EagerPredictor
from ppdist.export.spec import InferenceSpec, describe, validation_set
from ppdist.export.verify import decided_batches, eager_outputs
from ppdist.models.base import ImageModel
from ppdist.models.weights import load_all_weights

IMAGES = 20
CALIBRATION = 64
# What is exported unless told otherwise; of files under configs/.
MODELS = {
    "yolov5n": "yolov5/yolov5n_300e_coco.yml",
    "yolov5s": "yolov5/yolov5s_300e_coco.yml",
    "yolov5s6": "yolov5/yolov5s6_300e_coco.yml",
    "ppyoloe_s": "ppyoloe/ppyoloe_crn_s_300e_coco.yml",
    "ppyoloe_plus_s": "ppyoloe/ppyoloe_plus_s_80e_coco.yml",
    "ppyoloe_plus_s_p2": "ppyoloe/ppyoloe_plus_s_p2_300e_coco.yml",
    "ppyoloe_plus_s_p6": "ppyoloe/ppyoloe_plus_s_p6_300e_coco.yml",
    "ppyoloe_plus_t_aux": "ppyoloe/ppyoloe_plus_t_auxhead_300e_coco.yml",
    "rtdetr_r18": "rtdetr/rtdetr_r18_72e_coco.yml",
    "dfine_n": "dfine/dfine_n_160e_coco.yml",
    "yolov5s_cls": "yolov5/yolov5s_cls_imagenet.yml",
}
UNTRAINED_SIZE = 320  # pixels; enough for every level to have cells, and quick
_KEPT_BOXES = 40  # of an image, of untrained weights


@dataclass(frozen=True)
class Subject:
    """A model to export.

    images_N3HW: float32 RGB 0..255, what every export is compared on.
    sample: the validation set; None: untrained weights, or no set at hand.
    calibration: pictures_3HW of the training split for INT8; none: no INT8.
    """

    name: str
    weights: str
    model: ImageModel
    spec: InferenceSpec
    images_N3HW: np.ndarray
    sample: Sample | None = None
    calibration: Sequence[np.ndarray] = ()


def untrained(name: str, config_file: Path, images: Sequence[np.ndarray]) -> Subject:
    """A model of a configuration with random weights, at UNTRAINED_SIZE pixels.

    Args: images: uint8 RGB [H, W, 3].
    """
    config = load_config(config_file, [f"model.image_size=[{UNTRAINED_SIZE},{UNTRAINED_SIZE}]"])
    paddle.seed(0)
    model = build_model(config)
    spec = describe(config, None)
    images_N3HW = np.stack([prepare_input(image, spec) for image in images])
    enliven(model, images_N3HW[:4])
    images_N3HW = _decided(model, images_N3HW)
    if spec.nms is not None:
        scores = [outputs[0] for outputs in eager_outputs(model, batches(images_N3HW[:4], 1))]
        nms = spec.nms.model_copy(update={"score_threshold": threshold_for(scores)})
        spec = spec.model_copy(update={"nms": nms})
    return Subject(name, "random", model, spec, images_N3HW)


def trained(
    name: str, run: Path, images: Sequence[np.ndarray], warn: Callable[[str], None]
) -> Subject:
    """The best weights of a run, with the data they were trained on where these are at hand.

    Args: run: output_dir of the run: holds config.yml and checkpoints/best.
    """
    config = load_config(run / "config.yml")
    model = build_model(config)
    load_all_weights(model, run / "checkpoints" / "best")
    model.eval()
    dataset = validation_set(config, warn)
    spec = describe(config, dataset)
    sample: Sample | None = None
    calibration: Sequence[np.ndarray] = ()
    if dataset is not None and spec.nms is not None:
        eager = EagerPredictor(deployment_copy(model), spec.nms)
        sample = take_sample(dataset, eager, spec, len(dataset.records))
        records = spread_evenly(read_split(config.data, "train").records)
        calibration = Pictures(select_readable(records, CALIBRATION, warn), spec)
    images_N3HW = _decided(model, np.stack([prepare_input(image, spec) for image in images]))
    return Subject(name, "trained", model, spec, images_N3HW, sample, calibration)


def _decided(model: ImageModel, images_N3HW: np.ndarray) -> np.ndarray:
    """See `decided_batches`, of an even number of images."""
    kept = decided_batches(deployment_copy(model), batches(images_N3HW, 1))
    return np.concatenate(kept[: max(2, len(kept) // 2 * 2)])


def require_known(names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise ConfigError(
            f"expected some of {', '.join(MODELS)}",
            code="option_invalid",
            where=f"--models {unknown[0]}",
        )


def images_of(folder: Path | None) -> list[np.ndarray]:
    """The first images of a folder, by name, or made-up scenes; uint8 RGB [H, W, 3].

    Raises: DataError: no image there.
    """
    if folder is None:
        scenes = [scene(256, 0, 0, place) for place in range(IMAGES)]
        return [picture for picture, *_ in scenes]
    files = sorted(file for file in folder.glob("*") if is_image_name(file.name))
    if not files:
        raise DataError("no image in this folder", code="no_images", where=f"--images {folder}")
    return [read_image(file) for file in files[:IMAGES]]


@paddle.no_grad()
def enliven(model: ImageModel, images_B3HW: np.ndarray) -> None:
    """Gives untrained weights outputs that depend on the image, in place.

    New models predict the same everywhere: their predictors start at zero, and statistics of fresh
    batch norms let deep features fade.  With normalised features a random network is chaotic: each
    layer enlarges rounding, to 2e-4 in the scores of PP-YOLOE-s.  Where its activations are almost
    linear (inputs of 2 +- 0.5) it is not, to 2e-5.
    """
    norms = [layer for layer in model.sublayers() if isinstance(layer, nn.BatchNorm2D)]
    for layer in model.sublayers():
        if isinstance(layer, nn.Conv2D | nn.Linear) and not layer.weight.numpy().any():
            layer.weight.set_value(paddle.randn(layer.weight.shape) * 0.02)
    for layer in norms:
        set_momentum(layer, 0.0)  # the statistics of exactly this batch
        layer.weight.set_value(paddle.full(layer.weight.shape, 0.5))
        layer.bias.set_value(paddle.full(layer.bias.shape, 2.0))
    model.train()
    model(model.normalize(paddle.to_tensor(images_B3HW)))
    for layer in norms:
        set_momentum(layer, 0.9)
    model.eval()


def threshold_for(scores: Sequence[np.ndarray], boxes: int = _KEPT_BOXES) -> float:
    """The score that so many predictions of an image reach, on average; scores_BNC each."""
    everything = np.concatenate([part.ravel() for part in scores])
    most = min(boxes * len(scores), everything.size)
    return float(np.partition(everything, -most)[-most])


def batches(images_N3HW: np.ndarray, batch: int) -> list[np.ndarray]:
    return [images_N3HW[start : start + batch] for start in range(0, len(images_N3HW), batch)]
