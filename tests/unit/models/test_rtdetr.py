"""RT-DETR and D-FINE: sizes, denoising queries, saved graphs, and what deployment leaves."""

from pathlib import Path

import numpy as np
import paddle
import pytest
from pydantic import ValidationError

from ppdist.config.model import RTDETR_SIZES, RTDETRConfig
from ppdist.distributed.paddle_api import running_statistics
from ppdist.models.attention import HIDDEN
from ppdist.models.base import Targets, freeze
from ppdist.models.complexity import complexity
from ppdist.models.denoising import DenoisingQueries, attention_bias
from ppdist.models.outputs import BINS, weighting
from ppdist.models.rtdetr import RTDETR, SIZES
from tests.unit.models.saved_graph import Decoded, saved_graph

# Published: millions of parameters and GFLOPs at 640 x 640, rounded as in the repositories.
PUBLISHED = {
    ("dfine", "n"): (4, 7), ("dfine", "s"): (10, 25), ("dfine", "m"): (19, 57),
    ("dfine", "l"): (31, 91), ("dfine", "x"): (62, 202),
    ("rtdetr", "r18"): (20, 60), ("rtdetr", "r34"): (31, 92), ("rtdetr", "r50"): (42, 136),
    ("rtdetr", "r101"): (76, 259), ("rtdetr", "l"): (32, 110), ("rtdetr", "x"): (67, 234),
}  # fmt: skip
FAST = {("dfine", "n")}


def tiny(variant: str = "dfine", size: str = "n", **keys: object) -> RTDETR:
    paddle.seed(0)
    config = {"variant": variant, "size": size, "num_classes": 3, "queries": 12, **keys}
    model = RTDETR(RTDETRConfig.model_validate(config))
    for head in (*model.decoder.dec_bbox_head, model.decoder.enc_bbox_head):
        weight = head.layers[-1].weight
        weight.set_value(0.05 * paddle.randn(weight.shape))  # boxes that differ
    return model.eval() or model


@pytest.mark.parametrize(
    ("variant", "size"),
    [row if row in FAST else pytest.param(*row, marks=pytest.mark.slow) for row in PUBLISHED],
)
def test_parameters_and_operations_are_the_published(variant: str, size: str) -> None:
    counted = complexity(RTDETR(RTDETRConfig(variant=variant, size=size)))
    parameters, gflops = PUBLISHED[variant, size]
    # Published are whole millions of what predicts; ours count what only training has, too.
    assert counted.parameters / 1e6 == pytest.approx(parameters, rel=0.04, abs=0.5)
    assert counted.operations.of((640, 640)) / 1e9 == pytest.approx(gflops, rel=0.06)


def test_tables_of_sizes_agree() -> None:
    assert {variant: tuple(rows) for variant, rows in SIZES.items()} == RTDETR_SIZES


def test_size_of_another_variant_is_refused_with_the_list() -> None:
    with pytest.raises(ValidationError, match="dfine has the sizes n, s, m, l, x"):
        RTDETRConfig(variant="dfine", size="r18")


def targets_of(*counts: int, most: int, seeds: list[int]) -> Targets:
    """Boxes of 20 x 30 pixels; image i has counts[i]."""
    mask = np.arange(most) < np.array(counts)[:, None]
    corner = np.arange(most)[:, None] * 7.0 + np.array([5.0, 3.0])
    boxes = np.concatenate([corner, corner + np.array([20.0, 30.0])], axis=1) * mask[..., None]
    labels = np.arange(most) % 3 * mask
    return Targets(
        paddle.to_tensor(boxes.astype("float32")),
        paddle.to_tensor(labels.astype("int64")),
        paddle.to_tensor(mask.astype("float32")),
        np.array(seeds),
    )


SIZE = np.array([128, 96, 128, 96], "float32")


def test_denoising_queries_are_those_of_the_image_alone() -> None:
    make = DenoisingQueries(3, 10)
    both = make(targets_of(4, 0, most=5, seeds=[7, 8]), paddle.to_tensor(SIZE))
    alone = make(targets_of(4, most=12, seeds=[7]), paddle.to_tensor(SIZE))
    used = int(both.positive_BD[0].sum() + both.negative_BD[0].sum())
    assert both.groups_B.tolist() == [2.0, 10.0] and used == 2 * 2 * 4
    assert float(both.positive_BD[1].sum() + both.negative_BD[1].sum()) == 0
    for ours, other in zip(both[:6], alone[:6]):
        np.testing.assert_array_equal(ours[0, :used].numpy(), other[0, :used].numpy())
    assert both.labels_BD[0, used:].tolist() == [0] * (20 - used)


def test_near_boxes_stay_nearer_than_far_ones() -> None:
    targets = targets_of(2, most=2, seeds=[3])
    noisy = DenoisingQueries(3, 100)(targets, paddle.to_tensor(SIZE))
    box = noisy.boxes_BD4[0].numpy() * SIZE
    own = targets.boxes_BM4[0].numpy()[noisy.target_BD[0].numpy()]
    size = own[:, 2:] - own[:, :2]
    moved = np.abs(box[:, :2] - (own[:, 2:] + own[:, :2]) / 2) / size
    near, far = noisy.positive_BD[0].numpy() == 1, noisy.negative_BD[0].numpy() == 1
    assert near.sum() == far.sum() == 100
    assert moved[near].max() <= 0.5 + 1e-5 and moved[far].max() > 0.5
    flipped = noisy.labels_BD[0].numpy() != noisy.target_BD[0].numpy() % 3
    assert 0.08 < flipped.mean() < 0.28  # a quarter drawn, a third of those the same


def test_query_sees_its_group_and_the_selected_queries() -> None:
    bias = attention_bias(paddle.to_tensor([[0, 0, 1, -4]]), 2)[0, 0].numpy()
    sees = bias == 0
    assert set(np.unique(bias)) == {0.0, np.float32(HIDDEN)}
    assert sees.astype(int).tolist() == [
        [1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 1, 1], [0, 0, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1],
    ]  # fmt: skip


def test_outputs_of_an_image_do_not_depend_on_the_others() -> None:
    model, images = tiny(), paddle.rand([2, 3, 96, 96])
    both = model(images, targets_of(1, 5, most=5, seeds=[1, 2]))
    alone = model(images[:1], targets_of(1, most=1, seeds=[1]))
    assert both.denoised is not None and alone.denoised is not None
    used = 2 * 100
    pairs = [(both.layers[-1], alone.layers[-1]), (both.encoder, alone.encoder)]
    for ours, other in pairs:
        np.testing.assert_allclose(ours.boxes_BQ4[0], other.boxes_BQ4[0], atol=2e-6)
    ours, other = both.denoised.layers[-1], alone.denoised.layers[-1]
    np.testing.assert_allclose(ours.boxes_BQ4[0, :used], other.boxes_BQ4[0, :used], atol=2e-6)


def test_every_weight_is_reached_without_an_object() -> None:
    model = tiny()
    outputs = model(paddle.rand([1, 3, 96, 96]), targets_of(0, most=1, seeds=[0]))
    assert outputs.denoised is not None and outputs.preliminary is not None
    rows = [*outputs.layers, outputs.encoder, outputs.preliminary, *outputs.denoised.layers]
    rows.append(outputs.denoised.preliminary)
    sums = [x.sum() for row in rows for x in row if x is not None and not x.stop_gradient]
    paddle.add_n(sums).backward()
    trained = [(key, p) for key, p in model.named_parameters() if not p.stop_gradient]
    assert [key for key, p in trained if p.grad is None] == []


@pytest.mark.parametrize(
    ("variant", "size"), [("dfine", "n"), pytest.param("rtdetr", "r18", marks=pytest.mark.slow)]
)
def test_fused_and_saved_model_predicts_the_same(variant: str, size: str, tmp_path: Path) -> None:
    model, images = tiny(variant, size), paddle.rand([1, 3, 96, 160])
    with paddle.no_grad():
        before = model.decode(model(images))
        model.fuse()
        after = model.decode(model(images))
    graph = saved_graph(Decoded(model), tmp_path)
    for fused, saved, true in zip(after, graph(images), before, strict=True):
        assert tuple(true.shape)[:2] == (1, 12)
        np.testing.assert_allclose(fused.numpy(), true.numpy(), atol=2e-3)
        np.testing.assert_allclose(saved.numpy(), fused.numpy(), atol=2e-3)


def test_stages_and_frozen_norms() -> None:
    model = tiny()
    freeze(model, ["backbone.*.bn"])
    assert list(model.stages) == [
        "backbone.stem", *(f"backbone.stages.{i}" for i in range(4)), "neck", "head",
    ]  # fmt: skip
    norm = model.backbone.stem.stem4.block.bn
    before = running_statistics(norm)[0].numpy().copy()
    model.train()
    model(paddle.rand([1, 3, 64, 64]))
    np.testing.assert_array_equal(
        running_statistics(model.backbone.stem.stem4.block.bn)[0].numpy(), before
    )
    assert norm.weight.stop_gradient


def test_weighting_is_fine_at_the_middle_and_symmetric() -> None:
    values = weighting(paddle.to_tensor([0.5]), paddle.to_tensor([4.0])).numpy()
    assert len(values) == BINS and values[16] == 0
    np.testing.assert_allclose(values, -values[::-1], atol=1e-6)
    np.testing.assert_allclose(values[[-1, -2]], [4.0, 2.0], rtol=1e-5)  # 2 a, and a
    assert (np.diff(values[16:]) > 0).all() and values[17] == pytest.approx(
        3 ** (2 / 30) - 1, rel=1e-4
    )
