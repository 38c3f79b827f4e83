"""--at-least of tools/eval.py is understood before the evaluation, not after it."""

import runpy
from pathlib import Path

import pytest

from ppdist.errors import ConfigError, UserError

TOOL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "eval.py"))


def test_a_bound_is_a_metric_and_a_number():
    assert TOOL["read_bound"]("mAP50=0.8") == ("mAP50", 0.8)
    assert TOOL["read_bound"](None) is None
    with pytest.raises(ConfigError, match=r"--at-least mAP50: expected METRIC=VALUE"):
        TOOL["read_bound"]("mAP50")


def test_a_metric_that_does_not_exist_is_named():
    TOOL["judge"]("mAP50", 0.8, {"mAP50": 0.8})
    with pytest.raises(UserError, match=r"mAP50 is 0\.7000, below the 0\.8 asked for"):
        TOOL["judge"]("mAP50", 0.8, {"mAP50": 0.7})
    with pytest.raises(ConfigError, match="no metric 'mAP_50'; there is mAP50"):
        TOOL["judge"]("mAP_50", 0.8, {"mAP50": 0.7})
