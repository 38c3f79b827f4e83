"""A tracker for tests, in a module that a process imports in no time."""

import os
import time

from ppdist.common.trackers import TrackedRun
from ppdist.common.writers import MetricWriter


class Noting(MetricWriter):
    """Writes down what it is called with; the tag `fail` or `hang` makes it do so."""

    def __init__(self, run: TrackedRun) -> None:
        self.file = run.folder / "noted.txt"
        self.note("begins", run.name, run.resume_step, os.getppid() != os.getpid())

    def note(self, *words: object) -> None:
        with self.file.open("a") as file:
            print(*words, file=file)

    def add_scalars(self, step, values) -> None:
        if "print" in values:
            os.system("echo key $NOTING_API_KEY at https://me:p4ss@host/x")
            raise ConnectionError("https://me:p4ss@host/x: the server is gone")
        if any("fail" in tag for tag in values):
            raise ConnectionError("the server is gone")
        if "hang" in values:
            time.sleep(1000)
        self.note(step, *values.items())

    def add_images(self, step, tag, images_HW3) -> None:
        self.note(step, tag, *(each.shape for each in images_HW3))

    def describe(self, hyper_parameters, metrics, texts) -> None:
        self.note(hyper_parameters, metrics, texts)

    def rollback(self, step) -> None:
        self.note("rollback", step)

    def close(self) -> None:
        self.note("closed")
