"""Boxes of several members become one set: the same on any number of ranks."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from ppdist.config.distributed import DistributedConfig
from ppdist.distributed import comm
from ppdist.distributed.comm import EvaluationFailed
from ppdist.lab.ensemble import fuse
from ppdist.lab.ensemble.fuse import (
    Member,
    fuse_members,
    make_member,
    require_same_images,
    write_fused,
)
from ppdist.lab.ensemble.wbf import weighted_fusion
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.unit.engine.oracle import five_images

IOU, MOST = 0.55, 100


def member(name: str, rows_R7: np.ndarray) -> Member:
    return make_member(name, rows_R7, five_images(), MOST)


def some_members(images: int = 5, count: int = 3) -> list[Member]:
    """Random boxes, none in image 1; nothing at all from the last member; of this rank's images."""
    members = []
    for place in range(count):
        rng = np.random.default_rng(place)
        rows = 0 if place == count - 1 else 60
        position_R = rng.choice([n for n in range(images) if n != 1], rows)
        corner_R2 = rng.uniform(0, 60, (rows, 2))
        rows_R7 = np.concatenate(
            [
                np.stack([position_R, rng.integers(0, 2, rows), rng.random(rows)], axis=1),
                corner_R2,
                corner_R2 + rng.uniform(10, 60, (rows, 2)),
            ],
            axis=1,
        ).astype(np.float32)
        order_R = np.argsort(rows_R7[:, 0], kind="stable")
        members.append(member(f"member {place}", rows_R7[order_R]))
    return members


def fails_on_rank_1(*given):
    if comm.rank() == 1:
        raise ValueError("boxes")
    return weighted_fusion(*given)


def on_ranks(_):
    """Of this rank: what is fused, what two members score, what it holds, how a failure ends."""
    comm.init("cpu", DistributedConfig())
    members = some_members()
    fused = fuse_members(members, IOU, 300).tobytes().hex()
    scored = member("scored", of_truth())
    held = sorted({int(image) for member in members for image in member.rows_R7[:, 0]})
    fuse.weighted_fusion = fails_on_rank_1  # this process ends here
    try:
        fuse_members(members, IOU, 300)
    except EvaluationFailed as error:
        return fused, [scored.scores, scored.boxes], held, str(error)


def of_truth() -> np.ndarray:
    """True boxes of the four images that have some, those of the last a little off."""
    rows = [
        [position, label, 0.9, *(box + (position == 4))]
        for position, record in enumerate(five_images().records)
        for label, box in zip(record.labels_M, record.boxes_M4)
    ]
    return np.array(rows, np.float32)


def test_two_ranks_fuse_as_one_does() -> None:
    alone = fuse_members(some_members(), IOU, 300).tobytes().hex()
    scored = member("scored", of_truth())
    assert scored.boxes == 10 and scored.scores["mAP50"] == 1 > scored.scores["mAP"]
    found = run_on_ranks(2, "tests.unit.lab.ensemble.test_fuse:on_ranks")
    assert [rank[:2] for rank in found] == [[alone, [scored.scores, scored.boxes]]] * 2
    assert [rank[2] for rank in found] == [[0, 2, 4], [3]], "each holds its own images"
    assert found[0][3] == found[1][3]
    assert found[0][3].startswith("rank 1 (host ") and found[0][3].endswith("): ValueError: boxes")


def test_each_image_and_class_is_fused_alone() -> None:
    members = some_members()
    fused_R7 = fuse_members(members, IOU, 300)
    assert (np.diff(fused_R7[:, 0]) >= 0).all() and 1 not in fused_R7[:, 0]
    for image in (0, 2, 3, 4):
        of_image_R7 = fused_R7[fused_R7[:, 0] == image]
        assert (np.diff(of_image_R7[:, 2]) <= 0).all()
        for label in (0, 1):
            found = of_image_R7[of_image_R7[:, 1] == label]
            rows_R7 = np.concatenate([each.rows_R7 for each in members]).astype(np.float64)
            rows_R7 = rows_R7[(rows_R7[:, 0] == image) & (rows_R7[:, 1] == label)]
            boxes_K4, scores_K = weighted_fusion(rows_R7[:, 3:], rows_R7[:, 2], 3, IOU)
            np.testing.assert_array_equal(found[:, 2], scores_K.astype(np.float32))
            np.testing.assert_array_equal(found[:, 3:], boxes_K4.astype(np.float32))


def test_one_member_alone_keeps_its_scores() -> None:
    rows_R7 = np.array([[0, 0, 0.9, 0, 0, 9, 9], [0, 1, 0.8, 0, 0, 9, 9]], np.float32)
    fused_R7 = fuse_members([member("alone", rows_R7)], IOU, 300)
    np.testing.assert_array_equal(fused_R7, rows_R7)


def test_keep_limits_the_boxes_of_an_image() -> None:
    members = some_members()
    all_R7 = fuse_members(members, IOU, 300)
    kept_R7 = fuse_members(members, IOU, 3)
    for image in np.unique(all_R7[:, 0]):
        of_all, of_kept = (rows[rows[:, 0] == image] for rows in (all_R7, kept_R7))
        np.testing.assert_array_equal(of_kept, of_all[:3])
    broken_R7 = np.full((1, 7), np.nan, np.float32)
    broken_R7[0, 0] = 2
    broken = member("nan", broken_R7)
    assert broken.boxes == 1
    with_it_R7 = fuse_members([*members, broken], IOU, 300)
    np.testing.assert_array_equal(with_it_R7[:, 0], all_R7[:, 0])


def test_no_boxes_at_all_are_no_boxes() -> None:
    nothing = member("nothing", np.zeros((0, 7), np.float32))
    assert fuse_members([nothing], IOU, 300).shape == (0, 7)


def test_models_of_other_classes_or_images_are_refused() -> None:
    one = five_images()
    require_same_images("a.yml", one, "b.yml", replace(one, source="elsewhere"))
    require_same_images("a.yml", one, "b.yml", replace(one, class_names=("dog", "cat")))
    with raises("classes_differ", "a.yml", "b.yml", "cow, dog"):
        require_same_images("a.yml", one, "b.yml", replace(one, class_names=("cow", "dog")))
    with raises("validation_sets_differ", "test, 5 images", "4 images"):
        require_same_images("a.yml", one, "b.yml", replace(one, records=one.records[1:]))


def test_scores_and_boxes_are_written(tmp_path: Path) -> None:
    rows_R7 = np.array([[1, 0, 0.9, 10, 20, 42, 70]], np.float32)  # the object of image 1
    one = member("one", rows_R7)
    scores = write_fused(tmp_path, five_images(), [one], rows_R7, MOST)
    assert len(json.loads((tmp_path / "detections.json").read_text())) == 1
    assert scores == json.loads((tmp_path / "scores.json").read_text())
    assert scores["members"] == [{"name": "one", **one.scores}]
    assert scores["fused"]["mAP"] == one.scores["mAP"] > 0
