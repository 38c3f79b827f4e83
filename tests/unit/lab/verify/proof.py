"""`ppdist verify accelerator` on ranks of a test, small."""

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

from ppdist.lab.verify.accelerator import has_failed, verify_accelerator
from tests.forked import ROOT

SMALL = ("model.width_multiple=0.125", "model.image_size=[64,64]", "train.batch_size_per_card=2")


def prove(argument: dict) -> dict:
    """The report of this rank, with what it has printed.

    argument: `out`; maybe `steps`.
    """
    printed = io.StringIO()
    with redirect_stdout(printed):
        report = verify_accelerator(
            None,
            SMALL,
            Path(argument["out"]),
            lambda name: [sys.executable, str(ROOT / "tools" / f"{name}.py")],
            steps=argument.get("steps", 4),
            efficiency=0.0,
        )
    return report | {"failed": has_failed(report), "printed": printed.getvalue()}
