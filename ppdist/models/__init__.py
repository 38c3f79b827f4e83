"""Detectors, their building blocks, and the weights they start from."""

from ppdist.models.detector import Detector
from ppdist.models.ppyoloe import PPYOLOE, PPYOLOEConfig

__all__ = ["Detector", "build_model"]


def build_model(config: PPYOLOEConfig) -> Detector:
    """The detector a `model:` section describes, with fresh weights drawn from paddle's seed."""
    return PPYOLOE(config)
