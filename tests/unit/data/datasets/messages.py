"""The message with which a data set is refused."""

import re

import pytest

from ppdist.common.errors import DataError
from ppdist.config.data import DataConfig
from ppdist.data.datasets.annotations import CLEAN_COPY
from ppdist.data.datasets.build import read_split

_REMEDY = re.compile(rf"; ({re.escape(CLEAN_COPY)}|(all )?[\d of]+ \w+ are so: .*)$")


def message_of(config: DataConfig, code: str, split="train", num_classes: int | None = 3) -> str:
    with pytest.raises(DataError) as caught:
        read_split(config, split, num_classes)
    assert caught.value.code == code
    return re.sub(_REMEDY, "", str(caught.value))
