"""The losses of RT-DETR and D-FINE, and their gradients, are those of transformers."""

import json

import paddle
import pytest

from ppdist.config.loss import RTDETRLossConfig
from ppdist.losses.rtdetr import RTDETRLoss
from ppdist.models.outputs import Denoised, Refined, RTDETROutputs
from tests.reference.detr_losses import (
    CASES,
    FILE,
    SIZE,
    Case,
    denoised,
    outputs,
    summary,
    truth,
)

STORED = json.loads(FILE.read_text(encoding="utf-8"))["cases"]


def refined(case: Case) -> dict[str, Refined]:
    tensors = {
        name: {key: paddle.to_tensor(value) for key, value in x.items()}
        for name, x in outputs(case).items()
    }
    for x in tensors.values():
        for key, tensor in x.items():
            tensor.stop_gradient = key == "reference"
    keys = {"logits": "logits_BQC", "boxes": "boxes_BQ4"}
    keys |= {"corners": "corners_BQ4R", "reference": "reference_BQ4"}
    return {n: Refined(**{keys[key]: t for key, t in x.items()}) for n, x in tensors.items()}


def raw(case: Case, found: dict[str, Refined]) -> RTDETROutputs:
    height, width = SIZE

    def layers(prefix: str) -> tuple[Refined, ...]:
        return tuple(x for name, x in found.items() if name.startswith(f"{prefix}layer"))

    noisy = None
    if case.groups:
        target, positive = map(paddle.to_tensor, denoised(case))
        groups = paddle.full([len(case.real)], float(case.groups))
        noisy = Denoised(
            layers("denoised "),
            found.get("denoised preliminary"),
            target,
            positive,
            1.0 - positive,
            groups,
        )
    size = paddle.to_tensor([width, height] * 2, dtype="float32")
    return RTDETROutputs(layers(""), found["encoder"], size, found.get("preliminary"), noisy)


def pixels(case: Case) -> list[paddle.Tensor]:
    boxes, labels, mask = truth(case)
    height, width = SIZE
    corners = [boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2]
    xyxy = [paddle.to_tensor(each * [width, height]) for each in corners]
    return [paddle.concat(xyxy, -1), *map(paddle.to_tensor, (labels, mask))]


@pytest.mark.parametrize("name", CASES)
def test_detr_terms_and_gradients_equal_stored_torch_values(name: str) -> None:
    case, stored = CASES[name], STORED[name]
    found = refined(case)
    of_bins = {"up_1": paddle.to_tensor([0.5]), "reg_scale_1": paddle.to_tensor([4.0])}
    loss = RTDETRLoss(RTDETRLossConfig(classification=case.classification), **of_bins)
    terms = dict(zip(("matched", "denoised"), loss.terms(raw(case, found), *pixels(case))))
    for kind, of_kind in terms.items():
        expected = stored["terms"].get(kind, {})
        assert of_kind.keys() == expected.keys()
        for term, values in of_kind.items():
            by_output = [sum(expected[term])] if term == "ddf" else expected[term]
            assert values.numpy() == pytest.approx(by_output, rel=1e-4), (kind, term)
    loss(raw(case, found), *pixels(case), 0).total.backward()
    for key, values in stored["gradients"].items():
        output, _, leaf = key.rpartition(".")
        gradient = dict(zip(("logits", "boxes", "corners"), found[output]))[leaf].grad
        assert summary(gradient.numpy()) == pytest.approx(values, abs=1e-3 * values[0]), key
