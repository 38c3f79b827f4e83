"""What the user is told at the start of a run: in one order, wherever it comes from."""

from types import SimpleNamespace

from ppdist.engine.messages import About, Messages


def test_warnings_come_by_what_they_are_about_and_before_details():
    messages, told = Messages(), []
    messages.warn(About.RUN, ["few images"])
    messages.detail(["two layers are frozen"])
    messages.warn(About.MACHINE, ["old driver", "no room"])
    messages.warn(About.IMAGES, ["a cut file"])
    messages.write(
        SimpleNamespace(warning=lambda text, code: told.append(text), detail=told.append), {}
    )
    assert told == ["a cut file", "old driver", "no room", "few images", "two layers are frozen"]
    assert messages.warnings(About.MACHINE) == told[1:4]
