"""Stores whose requests of images fail for a while."""

import threading
from collections import Counter

from ppdist.common import addresses
from ppdist.common.errors import StorageError
from ppdist.storage import stores


class Sick:
    """Fails the requests of images, each so many times, then gives what is there."""

    def __init__(
        self, monkeypatch, failure: OSError | StorageError, times: int, only: str = ""
    ) -> None:
        self.asked: Counter[tuple] = Counter()
        self.well = threading.Event()
        asking = stores._call_filesystem

        def ask(path, what, seconds=None, **arguments):
            key = (str(path), *arguments.values())
            of_image = what == "cat_file" and addresses.absolute(path).endswith((".jpg", ".tar"))
            if of_image and only in str(path) and not self.well.is_set():
                self.asked[key] += 1
                if self.asked[key] <= times:
                    raise failure
            return asking(path, what, seconds, **arguments)

        monkeypatch.setattr(stores, "_call_filesystem", ask)


AWAY = stores._unavailable_error("the store answers HTTP 503 SlowDown", "memory://set")
