"""Stores what numpy computes for the small cases in values.json; a reason is required.

    python -m tests.reference.regenerate --reason "why the numbers are allowed to change"

Only a change of the formulas, of a case, or of a published architecture is a reason: our models and
losses are compared with this file, it is not made from them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.cases import NAMES, Outcome, by_numpy

FILE = Path(__file__).parent / "values.json"
SAMPLES = 8


def summary(outcome: Outcome) -> dict[str, Any]:
    """Shape, mean, deviation and eight values of each output, and all losses."""
    outputs = {}
    for name, array in outcome.outputs.items():
        where = np.linspace(0, array.size - 1, SAMPLES).astype(int)
        numbers = [array.mean(), array.std(), *array.ravel()[where]]
        outputs[name] = {"shape": list(array.shape), "values": [float(x) for x in numbers]}
    return {"outputs": outputs, "losses": {key: float(x) for key, x in outcome.losses.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reason", required=True, help="why the numbers change")
    reason = parser.parse_args().reason
    cases = {name: summary(by_numpy(name)) for name in NAMES}
    text = json.dumps({"reason": reason, "cases": cases}, indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
