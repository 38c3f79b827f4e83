"""How a data set is refused."""

from ppdist.config.data import DataConfig
from ppdist.data.datasets.build import read_split
from tests.errors import raises


def refused(config: DataConfig, code: str, *facts: str, split="train", num_classes=3) -> str:
    """The message; `facts` are what it names."""
    with raises(code, *facts) as caught:
        read_split(config, split, num_classes)
    return str(caught.value)
