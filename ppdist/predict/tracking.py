"""Follows objects through the frames of a video, with the package `trackers`.

ByteTrack: Zhang et al. 2022, arXiv:2110.06864.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ppdist.common.errors import ConfigError
from ppdist.predict.detections import Detections
from ppdist.predict.sources import USUAL_RATE, Frame

_TRACK_SCORE = 0.5  # largest score that a box needs to begin a track; see Tracker


def require_tracker() -> None:
    """Checks that the package `trackers` is installed.

    Raises: ConfigError: it is not installed.
    """
    if importlib.util.find_spec("trackers") is None:
        raise ConfigError(
            "tracking needs the package trackers, which is not installed",
            code="package_missing",
            fix="pip install 'ppdist[track]'",
        )


def make_follower(threshold: float) -> Callable[[Frame, Detections], Detections]:
    """Returns a function that adds `track_ids` to the objects of each video; images are unchanged.

    Args: threshold: lowest score of the boxes.
    Raises: ConfigError: the package is not installed.
    """
    require_tracker()
    tracker_of: dict[str, Tracker] = {}  # of the one video that is being read

    def follow(frame: Frame, detections: Detections) -> Detections:
        if frame.index is None:
            return detections
        if frame.name not in tracker_of:
            tracker_of.clear()
            tracker_of[frame.name] = Tracker(frame.rate, threshold)
        return tracker_of[frame.name].update(detections)

    return follow


class Tracker:
    """A ByteTrack tracker of one video.

    Args:
        rate: frames per second.
        threshold: lowest score of the boxes.
    Raises: ConfigError: the package is not installed.
    """

    def __init__(self, rate: float, threshold: float) -> None:
        require_tracker()
        from trackers import ByteTrackTracker

        # The defaults suit COCO's best detectors; here every box that the user keeps may be an
        # object.
        track_score = max(_TRACK_SCORE, threshold)
        self._tracker: Any = ByteTrackTracker(
            frame_rate=rate or USUAL_RATE,
            track_activation_threshold=track_score,
            high_conf_det_threshold=track_score,
            minimum_consecutive_frames=1,
        )

    def update(self, detections: Detections) -> Detections:
        """Returns the objects of the next frame, with `track_ids` from 0.

        An object gets its id in its second frame; -1 means that it has none yet.
        """
        detected = detections.to_supervision()
        detected.data["row"] = np.arange(len(detections))
        tracked = self._tracker.update(detected)
        ids_N = np.full(len(detections), -1, np.int64)
        if len(tracked) and tracked.tracker_id is not None:
            ids_N[tracked.data["row"].astype(int)] = tracked.tracker_id
        return replace(detections, track_ids=ids_N)
