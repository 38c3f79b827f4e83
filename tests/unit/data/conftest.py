"""What tests of several modules of data/ share."""

import pytest

from ppdist.data.checks import images


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are checked in this process: none of a test's files kills a decoder, and a fork is
    most of what checking a few of them costs."""

    def check_images(files, *, decode, workers, told=lambda at, found: None):
        found = [images.check_image(file.path, file.size, decode=decode) for file in files]
        for at, each in enumerate(found):
            told(at, each)
        return found

    monkeypatch.setattr(images, "check_images", check_images)
