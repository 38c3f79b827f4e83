"""Finding the class of one image after another, with an eager or an exported classifier.

predict = EagerClassifier(model)  or  ExportedClassifier(directory)
labels_K, scores_K = best_classes_of(predict, image_HW3, size)
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import paddle

from ppdist.config.runtime import RuntimeOptions
from ppdist.data.classify import resize_centre
from ppdist.inference import graph_input, open_exported
from ppdist.metrics.classification import rank
from ppdist.models.detector import ImageModel
from ppdist.runtime import DEFAULT

# images_B3HW, float32 RGB 0..255 -> probabilities_BC, float32
Classifier = Callable[[np.ndarray], np.ndarray]


class EagerClassifier:
    """The dygraph model as it stands; it is put into eval mode."""

    def __init__(self, model: ImageModel) -> None:
        self.model = model
        model.eval()

    @paddle.no_grad()
    def __call__(self, images_B3HW: np.ndarray) -> np.ndarray:
        return self.model.predict(paddle.to_tensor(images_B3HW)).numpy()


class ExportedClassifier:
    """An exported classifier; arguments and errors: ExportedPredictor."""

    def __init__(self, directory: Path, options: RuntimeOptions = DEFAULT) -> None:
        self.spec, _, self.graph = open_exported(directory, "classify", options)

    def __call__(self, images_B3HW: np.ndarray) -> np.ndarray:
        (probabilities_BC,) = self.graph(graph_input(images_B3HW, self.spec))
        return probabilities_BC


def prepare_centre(image_HW3: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Crops and resizes an RGB image as evaluation does; float32 [3, H, W], 0..255."""
    return resize_centre(image_HW3, size).transpose(2, 0, 1).astype(np.float32)


def best_classes_of(
    predict: Classifier, image_HW3: np.ndarray, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """The surest classes of one image, five at most.

    Args:
        image_HW3: uint8 RGB, any size.
        size: height and width the model gets.
    Returns: labels_K int64, best first, and scores_K float32, 0..1.
    """
    probabilities_1C = predict(prepare_centre(image_HW3, size)[None])
    ranking = rank(probabilities_1C, np.zeros(1, np.int64), np.zeros(1, np.int64))
    return ranking.labels_NK[0], ranking.scores_NK[0]
