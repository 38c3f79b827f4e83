import numpy as np
import paddle
import pytest

from ppdist.losses.classification import ClassificationLoss

RNG = np.random.RandomState(0)
LOGITS_BC = RNG.standard_normal((5, 7)).astype("float32") * 3
LABEL_B = np.array([0, 6, 3, 3, 1])


def loss_of(logits_BC, label_B, smoothing=0.0, mask_B=None):
    """What the loss gives for classes laid out as the loader does: first of 8 padded boxes."""
    labels_BM = np.zeros((len(label_B), 8), np.int64)
    mask_BM = np.zeros((len(label_B), 8), np.float32)
    labels_BM[:, 0] = label_B
    mask_BM[:, 0] = 1 if mask_B is None else mask_B
    boxes_BM4 = paddle.zeros([len(label_B), 8, 4])
    return ClassificationLoss(smoothing)(
        logits_BC, boxes_BM4, paddle.to_tensor(labels_BM), paddle.to_tensor(mask_BM), 0
    )


def cross_entropy(logits_BC, label_B, smoothing):
    """Of each image, from the definition: -sum_c q_c log p_c with a smoothed target q."""
    logits_BC = logits_BC.astype(np.float64)
    p_BC = np.exp(logits_BC) / np.exp(logits_BC).sum(1, keepdims=True)
    target_BC = np.full(p_BC.shape, smoothing / p_BC.shape[1])
    target_BC[np.arange(len(label_B)), label_B] += 1 - smoothing
    return -(target_BC * np.log(p_BC)).sum(1)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_sum_equals_smoothed_cross_entropy(smoothing):
    output = loss_of(paddle.to_tensor(LOGITS_BC), LABEL_B, smoothing)
    expected = cross_entropy(LOGITS_BC, LABEL_B, smoothing).sum()
    assert float(output.total) == pytest.approx(expected, rel=1e-6)
    assert float(output.normalizer) == 5
    right = (LOGITS_BC.argmax(1) == LABEL_B).sum()
    assert {name: float(part) for name, part in output.parts.items()} == {"train_top1": right}


def test_the_gradient_is_probability_minus_target():
    logits = paddle.to_tensor(LOGITS_BC, stop_gradient=False)
    loss_of(logits, LABEL_B, 0.1).total.backward()
    p_BC = np.exp(LOGITS_BC) / np.exp(LOGITS_BC).sum(1, keepdims=True)
    target_BC = np.eye(7)[LABEL_B] * 0.9 + 0.1 / 7
    np.testing.assert_allclose(logits.grad.numpy(), p_BC - target_BC, atol=1e-6)


def test_image_without_class_only_stays_in_graph():
    logits = paddle.to_tensor(LOGITS_BC, stop_gradient=False)
    output = loss_of(logits, LABEL_B, mask_B=[1, 1, 0, 1, 0])
    output.total.backward()
    keep = [0, 1, 3]
    assert float(output.normalizer) == 3
    expected = cross_entropy(LOGITS_BC[keep], LABEL_B[keep], 0.0).sum()
    assert float(output.total) == pytest.approx(expected, rel=1e-6)
    assert not logits.grad.numpy()[[2, 4]].any() and logits.grad.numpy()[keep].all()


def test_logits_of_low_precision_are_computed_in_float32():
    output = loss_of(paddle.to_tensor(LOGITS_BC * 1000).astype("bfloat16"), LABEL_B)
    assert output.total.dtype == paddle.float32
    assert np.isfinite(float(output.total))
