"""Both families at tiny width: our numbers, numpy's, and those stored in values.json, are one."""

import json

import numpy as np
import pytest

from tests.reference.cases import NAMES, Outcome, build, by_numpy, by_ours, keys_of
from tests.reference.formulas import CONSTANT, uniform
from tests.reference.parity.reference import official_shape, official_state
from tests.reference.regenerate import FILE, summary

TOLERANCE = {"boxes": 2e-3, "logits": 2e-5, "scores": 2e-5, "probabilities": 2e-5}  # px, 1, 1, 1
LOSSES = 1e-4  # relative; TAL takes IoUs to the sixth power


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> tuple[str, Outcome, dict]:
    """Name, numpy's outcome, what is stored."""
    stored = json.loads(FILE.read_text(encoding="utf-8"))["cases"][request.param]
    return request.param, by_numpy(request.param), stored


def test_numpy_computes_what_is_stored(case: tuple[str, Outcome, dict]) -> None:
    _, outcome, stored = case
    found = summary(outcome)
    assert found["losses"] == pytest.approx(stored["losses"], rel=1e-9)
    for name, output in stored["outputs"].items():
        assert found["outputs"][name]["shape"] == output["shape"]
        assert found["outputs"][name]["values"] == pytest.approx(output["values"], rel=1e-9)


def test_model_and_loss_equal_stored_numpy_values(
    case: tuple[str, Outcome, dict],
) -> None:
    name, outcome, stored = case
    ours = by_ours(name)
    assert ours.losses == pytest.approx(stored["losses"], rel=LOSSES)
    found = summary(ours)["outputs"]
    for output, tolerance in TOLERANCE.items():
        if output in outcome.outputs:
            want = stored["outputs"][output]["values"]
            assert found[output]["values"] == pytest.approx(want, abs=tolerance)
            np.testing.assert_allclose(
                ours.outputs[output], outcome.outputs[output], rtol=0, atol=tolerance
            )


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_has_original_keys_and_shapes(name: str) -> None:
    state = official_state(build(name))
    ours = {key: official_shape(x) for key, x in state.items() if not CONSTANT.search(key)}
    assert ours == keys_of(name)


def test_formula_is_uniform_and_varies_by_seed_place() -> None:
    draw = uniform(1, 100_000)
    assert abs(draw.mean()) < 0.01 and abs(draw.std() - 3**-0.5) < 0.01
    assert -1 <= draw.min() < -0.99 and 0.99 < draw.max() < 1
    assert abs(np.corrcoef(draw[1:], draw[:-1])[0, 1]) < 0.02
    assert abs(np.corrcoef(draw, uniform(2, 100_000))[0, 1]) < 0.02
    assert uniform(7, 2).tolist() == [0.6943371536294964, -0.42509277417360547]
