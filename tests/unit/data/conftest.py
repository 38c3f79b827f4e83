"""What tests of several modules of data/ share."""

from functools import partial

import pytest

from ppdist.data.checks import images


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images are checked in this process: none of a test's files kills a decoder, and a fork is
    most of what checking a few of them costs."""

    def check_images(files, *, workers, done=lambda count: None):
        done(len(files))
        check = partial(images.check_image, decode=True)
        return [check(file.path, file.size, opener=file.opener) for file in files]

    monkeypatch.setattr(images, "check_images", check_images)
