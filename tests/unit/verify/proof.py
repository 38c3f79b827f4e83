"""`tools/verify.py accelerator` on ranks of a test, small."""

import io
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from ppdist.verify.accelerator import Options, failed, verify_accelerator
from tests.accelerator import plugin
from tests.forked import ROOT

SMALL = ("model.width_multiple=0.125", "model.image_size=[64,64]", "train.batch_size_per_card=2")


def prove(argument: dict) -> dict:
    """The report of this rank, with what it has printed.

    argument: `out`; maybe `steps`, `overrides`, and `zeros`: the card gives nothing else.
    """
    said = io.StringIO()
    with redirect_stdout(said), plugin.without_code() if argument.get("zeros") else nullcontext():
        report = verify_accelerator(
            None,
            [*SMALL, *argument.get("overrides", ())],
            Path(argument["out"]),
            lambda name: [sys.executable, str(ROOT / "tools" / f"{name}.py")],
            Options(argument.get("steps", 12), 0.0),
        )
    return report | {"failed": failed(report), "said": said.getvalue()}
