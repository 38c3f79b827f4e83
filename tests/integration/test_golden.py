"""The losses of a tiny run are the stored ones: no change of the arithmetic goes unnoticed."""

import json

import numpy as np
import pytest

from tests.golden.regenerate import ATSS_STEPS, DETECTORS, FOLDER, STEPS, golden_losses

# Rounding differs between CPUs (instruction sets, thread counts).  Noise of 1e-7 on every initial
# weight moved these losses by up to 2e-7 in the ATSS steps and 1e-5 after the change to TAL, where
# near-ties between predictions decide, and the gradient norms ten times as much.  D-FINE's losses
# moved by up to 1.3e-4, its gradient norms by 2.4e-3.
ATSS_TOLERANCE, TAL_TOLERANCE, NORM_FACTOR = 1e-4, 1e-3, 10
DETRS = ("dfine", "rtdetr")
HINT = 'if this change is wanted: python -m tests.golden.regenerate --reason "..."'


@pytest.mark.parametrize(
    "detector",
    [pytest.param(each, marks=pytest.mark.slow if each in DETRS else ()) for each in DETECTORS],
)
def test_twenty_losses_of_a_tiny_run_are_the_stored_ones(detector, tmp_path):
    stored = json.loads((FOLDER / f"{detector}.json").read_text(encoding="utf-8"))
    assert stored["reason"] and stored["versions"]["paddle"]
    losses = golden_losses(detector, tmp_path)
    assert list(losses) == list(stored["losses"])
    tolerance = np.repeat([ATSS_TOLERANCE, TAL_TOLERANCE], [ATSS_STEPS, STEPS - ATSS_STEPS])
    if detector in DETRS:
        tolerance[:] = TAL_TOLERANCE
    for name, values in losses.items():
        factor = NORM_FACTOR if name == "gradient_norm" else 1
        expected = np.array(stored["losses"][name])
        # What is next to nothing (layers that agree, at the start) has no digits to compare.
        size = np.maximum(np.abs(expected), 1e-3 * np.array(stored["losses"]["loss"]))
        off = np.abs(np.array(values) - expected) / size
        bad = np.flatnonzero(~(off <= tolerance * factor))  # also where it is not a number
        assert not bad.size, (
            f"{name} of step {bad[0] + 1} is {values[bad[0]]:.9g}, stored {expected[bad[0]]:.9g} "
            f"({off[bad[0]]:.1e} off); {HINT}"
        )
