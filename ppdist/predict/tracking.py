"""Objects followed through the frames of a video, by the package `trackers`.

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

_SURE = 0.5  # score of a box that begins a track, at most; see Tracker


def require_tracker() -> None:
    """Raises: ConfigError: the package is not installed."""
    if importlib.util.find_spec("trackers") is None:
        raise ConfigError(
            "tracking needs the package trackers, which is not installed",
            code="package_missing",
            fix="pip install 'ppdist[track]'",
        )


def following(threshold: float) -> Callable[[Frame, Detections], Detections]:
    """Adds `track_ids` to the objects of each video; images stay.

    Args: threshold: lowest score of the boxes it gets.
    Raises: ConfigError: the package is not installed.
    """
    require_tracker()
    current: dict[str, Tracker] = {}  # of the one video that is being looked at

    def follow(frame: Frame, found: Detections) -> Detections:
        if frame.index is None:
            return found
        if frame.name not in current:
            current.clear()
            current[frame.name] = Tracker(frame.rate, threshold)
        return current[frame.name].update(found)

    return follow


class Tracker:
    """ByteTrack through one video.

    Args:
        rate: frames a second.
        threshold: lowest score of the boxes it gets.
    Raises: ConfigError: the package is not installed.
    """

    def __init__(self, rate: float, threshold: float) -> None:
        require_tracker()
        from trackers import ByteTrackTracker

        # Its defaults are for COCO's best detectors; what the user calls an object is one.
        sure = max(_SURE, threshold)
        self._tracker: Any = ByteTrackTracker(
            frame_rate=rate or USUAL_RATE,
            track_activation_threshold=sure,
            high_conf_det_threshold=sure,
            minimum_consecutive_frames=1,
        )

    def update(self, found: Detections) -> Detections:
        """Objects of the next frame, with `track_ids` from 0.

        An object has one from its second frame on; -1: none yet.
        """
        marked = found.to_supervision()
        marked.data["row"] = np.arange(len(found))
        tracked = self._tracker.update(marked)
        ids_N = np.full(len(found), -1, np.int64)
        if len(tracked) and tracked.tracker_id is not None:
            ids_N[tracked.data["row"].astype(int)] = tracked.tracker_id
        return replace(found, track_ids=ids_N)
