"""What the user is told at the start of a run."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from ppdist.common.run_log import RunLog


class About(IntEnum):
    """What a message is about, in the order in which they are told."""

    IMAGES = 0  # what the check of the images found
    MACHINE = 1  # preflight, and the lock of the output folder
    START = 2  # the checkpoint that the run continues
    RUN = 3  # model, data and configuration


@dataclass(frozen=True)
class Message:
    """A line for the log; `warns`: on the console, too."""

    text: str
    about: About
    warns: bool


class Messages:
    """Messages from all parts that a run is built of."""

    def __init__(self) -> None:
        self._all: list[Message] = []

    def warn(self, about: About, texts: Iterable[str]) -> None:
        """Adds warnings."""
        self._all += [Message(text, about, True) for text in texts]

    def detail(self, texts: Iterable[str]) -> None:
        """Adds details for train.log."""
        self._all += [Message(text, About.RUN, False) for text in texts]

    def warnings(self, first: About = About.IMAGES) -> list[str]:
        """Texts of the warnings in order, from those about `first` on."""
        ordered = sorted(self._all, key=lambda message: message.about)
        return [message.text for message in ordered if message.warns and message.about >= first]

    def write(self, log: RunLog) -> None:
        """Writes all to the log of the run: warnings first."""
        for text in self.warnings():
            log.warning(text)
        for message in self._all:
            if not message.warns:
                log.detail(message.text)
