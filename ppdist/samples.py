"""Images of a data set that an export is tried on."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ppdist.classification import prepare_centre
from ppdist.data.images import read_image
from ppdist.data.sample import ImageRecord
from ppdist.errors import DataError
from ppdist.infer_spec import InferenceSpec
from ppdist.inference import prepare


def spread(records: Sequence[ImageRecord]) -> list[ImageRecord]:
    """All of them in an order whose every beginning is spread evenly over the list.

    Those whose place times the golden ratio has the smallest fractional part come first.
    """
    places = np.argsort(np.arange(len(records)) * ((5**0.5 - 1) / 2) % 1.0)
    return [records[place] for place in places]


def read_record(record: ImageRecord) -> np.ndarray:
    """uint8 RGB [H, W, 3].  Raises: DataError: as read_image."""
    return read_image(record.path, (record.height, record.width) if record.height else None)


def prepared(image_HW3: np.ndarray, spec: InferenceSpec) -> np.ndarray:
    """A uint8 RGB image of any size as the model gets it: float32 [3, H, W], 0..255."""
    if spec.resize.mode == "centre_crop":
        return prepare_centre(image_HW3, spec.input.size)
    return prepare(image_HW3, spec.input.size, spec.resize.mode)


class Pictures(Sequence[np.ndarray]):
    """What `prepared` makes of images; each is read when it is asked for, to save memory."""

    def __init__(self, records: Sequence[ImageRecord], spec: InferenceSpec) -> None:
        self._records, self._spec = records, spec

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, place: Any) -> Any:
        """Args: place: one number; several at once are not what this is for."""
        return prepared(read_record(self._records[place]), self._spec)


def readable(
    records: Sequence[ImageRecord], count: int, warn: Callable[[str], None]
) -> list[ImageRecord]:
    """The first of those that can be read; of twice as many: where no file is, none is found.

    Args: warn: gets one line if others had to stand in.
    """
    found: list[ImageRecord] = []
    broken: list[str] = []
    for record in records[: 2 * count]:
        try:
            read_record(record)
        except DataError as error:
            broken.append(str(error))
        else:
            found.append(record)
        if len(found) == count:
            break
    if broken:
        warn(f"{len(broken)} images cannot be read and are left out, the first: {broken[0]}")
    return found
