"""PP-YOLOE beyond s, m, l, x: t with its auxiliary head, P2 and P6 levels, sizes of one's own."""

from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.config.model import PPYOLOEConfig
from ppdist.cpu.switch import self_check
from ppdist.models.build import build_model
from ppdist.models.weights import arrays_of, load_weights
from tests.unit.models.tiny import loss_of, shake, tiny

LEVELS = {"P3-P5": (32, 16, 8), "P2-P5": (32, 16, 8, 4),
          "P3-P6": (64, 32, 16, 8), "P2-P6": (64, 32, 16, 8, 4)}  # fmt: skip


@pytest.mark.slow
def test_t_has_the_published_number_of_parameters() -> None:
    model = build_model(PPYOLOEConfig(size="t", auxiliary=True))
    assert model.parameter_count() == 7_946_706
    kept = {k: v for k, v in arrays_of(model).items() if not k.startswith(model.training_only)}
    counted = [v.size for k, v in kept.items() if not k.endswith(("._mean", "._variance"))]
    assert sum(counted) == 4_851_419  # published as 4.85 M: before fusion, unlike the other sizes
    model.fuse()
    assert model.parameter_count() == 4_662_251


def test_the_auxiliary_keys_are_the_official_ones() -> None:
    keys = set(tiny(auxiliary=True).state_dict())
    neck = {key.removeprefix("neck.") for key in keys if key.startswith("neck.")}
    assert {key.removeprefix("aux_neck.") for key in keys if key.startswith("aux_neck.")} == neck
    assert {key.removeprefix("aux_head.") for key in keys if key.startswith("aux_head.")} == {
        *(f"{task}_convs.0.{part}" for task in ("cls", "reg")
          for part in ("conv.weight", "norm.weight", "norm.bias")),
        *(f"gfl_{task}.{part}" for task in ("cls", "reg") for part in ("weight", "bias")),
        *(f"scales.{level}.scale" for level in range(3)),
    }  # fmt: skip
    assert "yolo_head.stem_cls.0.conv.conv1.conv.weight" in keys


def test_aux_head_gives_no_outputs_without_gradient() -> None:
    model, image = tiny(auxiliary=True), paddle.randn([2, 3, 64, 96])
    shake(model)
    assert [x.shape for x in model(image).aux_class_logits] == [
        x.shape for x in model(image).class_logits
    ]
    model.eval()
    with paddle.no_grad():
        outputs = model(image)
        decoded = model.decode(outputs)
        assert outputs.aux_class_logits == outputs.aux_reg_dist == ()
        del model.aux_neck, model.aux_head
        model.aux_neck = model.aux_head = None
        without = model(image)
    for x, y in zip(sum(outputs, ()), sum(without, ())):
        assert np.array_equal(x.numpy(), y.numpy())
    for x, y in zip(decoded, model.decode(without)):
        assert np.array_equal(x.numpy(), y.numpy())


def test_detaching_keeps_aux_gradient_to_aux_head() -> None:
    for detached in (False, True):
        model = tiny(auxiliary=True)
        shake(model)
        model.detach_auxiliary = detached
        outputs = model(paddle.randn([2, 3, 64, 64]))
        auxiliary = outputs.aux_class_logits + outputs.aux_reg_dist
        paddle.add_n([x.square().mean() for x in auxiliary]).backward()
        reached = {key.split(".")[0] for key, p in model.named_parameters() if p.grad is not None}
        own = {"aux_neck", "aux_head"}
        assert reached == (own if detached else own | {"backbone", "neck"})


def test_fusing_drops_aux_head_and_keeps_outputs() -> None:
    model, image = tiny(auxiliary=True), paddle.randn([1, 3, 64, 64])
    shake(model)
    model.eval()
    before = model.decode(model(image))
    model.fuse()
    assert not [key for key in model.state_dict() if key.startswith(model.training_only)]
    for x, y in zip(before, model.decode(model(image))):
        np.testing.assert_allclose(y.numpy(), x.numpy(), atol=1e-2)
    model.fuse()  # again: nothing to do


def test_weights_without_aux_head_leave_it_fresh(
    tmp_path: Path,
) -> None:
    trained = tiny(auxiliary=True)
    shake(trained)
    fuse_for_deployment = {k: v for k, v in arrays_of(trained).items() if not k.startswith("aux_")}
    np.savez(tmp_path / "deployed.npz", **fuse_for_deployment)
    model = tiny(auxiliary=True)
    start = arrays_of(model)
    report = load_weights(model, tmp_path / "deployed.npz")
    assert set(report.loaded) == set(fuse_for_deployment)
    assert {key.split(".")[0] for key in report.fresh} == {"aux_neck", "aux_head"}
    assert "training" in str(report) and "\n" not in str(report)
    for key, value in arrays_of(model).items():
        expected = fuse_for_deployment[key] if key in fuse_for_deployment else start[key]
        assert np.array_equal(value, expected), key


@pytest.mark.slow
@pytest.mark.parametrize("levels", LEVELS)
def test_levels_give_maps_of_their_strides_and_train(levels: str) -> None:
    model, strides = tiny(levels=levels), LEVELS[levels]
    assert model.strides == strides and model.size_multiple == strides[0]
    shake(model)
    total = loss_of(model, 128)
    total.backward()
    assert np.isfinite(float(total))
    outputs = model(paddle.randn([1, 3, 64, 128]))
    assert [tuple(x.shape[2:]) for x in outputs.class_logits] == [
        (64 // s, 128 // s) for s in strides
    ]


def test_p2_keeps_the_official_order_of_keys() -> None:
    state = build_model(PPYOLOEConfig(size="s", levels="P2-P5")).state_dict()
    plain = build_model(PPYOLOEConfig(size="s")).state_dict()
    for key, value in plain.items():  # the finer level is appended to every list
        assert state[key].shape == value.shape
    added = {".".join(key.split(".")[:3]) for key in set(state) - set(plain)}
    assert added == {
        "neck.fpn_stages.3", "neck.fpn_routes.2", "neck.pan_stages.2", "neck.pan_routes.2",
        *(f"yolo_head.{part}.3" for part in ("stem_cls", "stem_reg", "pred_cls", "pred_reg")),
    }  # fmt: skip
    assert state["yolo_head.pred_cls.3.weight"].shape == [80, 32, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "width"), [(0.01, 0.001), (0.5, 0.07), (1.49, 0.123)])
def test_any_multiples_give_trainable_fusable_model(depth: float, width: float) -> None:
    model = tiny(depth_multiple=depth, width_multiple=width, auxiliary=True)
    shake(model)
    loss_of(model).backward()
    assert all(np.isfinite(p.grad.numpy()).all() for p in model.parameters() if p.grad is not None)
    model.eval()
    image = paddle.randn([1, 3, 64, 32])
    with paddle.no_grad():
        before = [x.numpy() for x in model.decode(model(image))]
        model.fuse()
        for got, want in zip(model.decode(model(image)), before):
            np.testing.assert_allclose(got.numpy(), want, atol=1e-2, rtol=1e-4)


def test_fast_cpu_convolutions_agree_with_aux_head() -> None:
    assert self_check(tiny(auxiliary=True)) is None
