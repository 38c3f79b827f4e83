"""ppdist: distributed object-detector training on PaddlePaddle fleet (see docs/architecture.md)."""

__version__ = "0.1.0"
