"""Both families at tiny width compute what independent code computed: values.json.

Those numbers are no golden file of ours and never change with our code; `source` says what made
them.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.reference.cases import NAMES, build, computed
from tests.reference.formulas import CONSTANT, uniform
from tests.reference.parity.reference import official_shape, official_state

CASES = json.loads(Path(__file__).with_name("values.json").read_text(encoding="utf-8"))["cases"]
TOLERANCE = {"boxes": 2e-3, "logits": 2e-5, "scores": 2e-5, "probabilities": 2e-5}  # px, 1, 1, 1
LOSSES = 1e-4  # relative; TAL takes IoUs to the sixth power


@pytest.mark.parametrize("name", NAMES)
def test_model_and_loss_equal_stored_numpy_values(name: str) -> None:
    ours, stored = computed(name), CASES[name]
    assert ours.losses == pytest.approx(stored["losses"], rel=LOSSES)
    assert ours.outputs.keys() == stored["outputs"].keys()
    for output, array in ours.outputs.items():
        want = stored["outputs"][output]
        places = np.linspace(0, array.size - 1, len(want["values"]) - 2).astype(int)
        found = [array.mean(), array.std(), *array.ravel()[places]]
        assert list(array.shape) == want["shape"]
        assert found == pytest.approx(want["values"], abs=TOLERANCE[output])


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_has_original_keys_and_shapes(name: str) -> None:
    state = official_state(build(name))
    ours = {key: official_shape(x) for key, x in state.items() if not CONSTANT.search(key)}
    listed = json.dumps(sorted((key, list(shape)) for key, shape in ours.items()))
    assert hashlib.sha256(listed.encode()).hexdigest() == CASES[name]["keys"], listed


def test_formula_is_uniform_and_varies_by_seed_place() -> None:
    draw = uniform(1, 100_000)
    assert abs(draw.mean()) < 0.01 and abs(draw.std() - 3**-0.5) < 0.01
    assert -1 <= draw.min() < -0.99 and 0.99 < draw.max() < 1
    assert abs(np.corrcoef(draw[1:], draw[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(draw, uniform(2, 100_000))[0, 1]) < 0.02
    assert uniform(7, 2).tolist() == [0.6943371536294964, -0.42509277417360547]
