"""What another package brings: a detector, a backbone, a format and a tracker.

Here and in keys.py nothing imports Paddle, so that configurations are read without it.
"""

from blobs.keys import BlobsConfig, BlobsLossConfig, BlobsSetConfig, LinesConfig
from ppdist import (
    register_backbone,
    register_dataset,
    register_detector,
    register_tracker,
)


def register() -> None:
    """The entry point of the group `ppdist.plugins`."""
    register_detector(
        config=BlobsConfig,
        model="blobs.model:Blobs",
        loss_config=BlobsLossConfig,
        loss="blobs.loss:BlobsLoss",
    )
    register_backbone("blobs", "blobs.model:BlobsBackbone")
    register_dataset(config=BlobsSetConfig, reader="blobs.data:read")
    register_tracker(config=LinesConfig, writer="blobs.tracker:Lines")
