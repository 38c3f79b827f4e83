"""A model as a static graph, saved and loaded again."""

from pathlib import Path
from typing import Any

import paddle

from ppdist.models.base import ImageModel


class Decoded(paddle.nn.Layer):
    """Normalised images -> what the model decodes."""

    def __init__(self, model: ImageModel) -> None:
        super().__init__()
        self.model = model

    @paddle.jit.not_to_static
    def forward(self, images: paddle.Tensor) -> Any:
        return self.model.decode(self.model(images))


def saved_graph(layer: paddle.nn.Layer, folder: Path) -> paddle.nn.Layer:
    """The graph of a layer of one image input, of any batch and size, from its file."""
    layer.eval()
    spec = [paddle.static.InputSpec([None, 3, None, None], "float32", "images")]
    static = paddle.jit.to_static(layer, input_spec=spec, full_graph=True, backend=None)
    paddle.jit.save(static, str(folder / "m"))
    return paddle.jit.load(str(folder / "m"))
