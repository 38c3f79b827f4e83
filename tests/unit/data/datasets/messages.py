"""The message with which a data set is refused."""

import re

from ppdist.config.data import DataConfig
from ppdist.data.datasets.annotations import CLEAN_COPY
from ppdist.data.datasets.build import read_split
from tests.errors import raises

_REMEDY = re.compile(rf"; ({re.escape(CLEAN_COPY)}|(all )?[\d of]+ \w+ are so: .*)$")


def message_of(config: DataConfig, code: str, split="train", num_classes: int | None = 3) -> str:
    with raises(code) as caught:
        read_split(config, split, num_classes)
    return re.sub(_REMEDY, "", str(caught.value))
