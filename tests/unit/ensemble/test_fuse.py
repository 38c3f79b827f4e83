"""Detections of several members become one set: the same on any number of ranks; saved files."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ppdist.config.distributed import DistributedConfig
from ppdist.data.types import DetectionSet
from ppdist.distributed import comm
from ppdist.distributed.comm import EvaluationFailed
from ppdist.ensemble.fuse import (
    Member,
    fuse_members,
    member_of,
    read_saved,
    require_same_images,
    rows_of,
    set_of,
    write_fused,
)
from ppdist.ensemble.wbf import hard_suppression, weighted_fusion
from ppdist.metrics.coco import write_detections
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.unit.engine.oracle import five_images

WBF = partial(weighted_fusion, iou=0.55)


def some_members(images: int = 5, count: int = 3) -> list[Member]:
    """Random boxes, none in image 1; nothing at all from the last member; of this rank's images."""
    members = []
    for member in range(count):
        rng = np.random.default_rng(member)
        rows = 0 if member == count - 1 else 60
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
        members.append(member_of(f"member {member}", rows_R7[order_R], weight=1.0 + member))
    return members


def fails_on_rank_1(*given):
    if comm.rank() == 1:
        raise ValueError("boxes")
    return WBF(*given)


def on_ranks(_):
    """Of this rank: what is fused, what two members score, what it holds, how a failure ends."""
    comm.init("cpu", DistributedConfig())
    members = some_members()
    fused = fuse_members(members, WBF, 300).tobytes().hex()
    scored = member_of("scored", of_truth(), 1.0, five_images())
    held = sorted({int(image) for member in members for image in member.rows_R7[:, 0]})
    try:
        fuse_members(members, fails_on_rank_1, 300)
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
    alone = fuse_members(some_members(), WBF, 300).tobytes().hex()
    scored = member_of("scored", of_truth(), 1.0, five_images())
    assert scored.boxes == 10 and scored.scores["mAP50"] == 1 > scored.scores["mAP"]
    found = run_on_ranks(2, "tests.unit.ensemble.test_fuse:on_ranks")
    assert [rank[:2] for rank in found] == [[alone, [scored.scores, scored.boxes]]] * 2
    assert [rank[2] for rank in found] == [[0, 2, 4], [3]], "each holds its own images"
    assert found[0][3] == found[1][3]
    assert found[0][3].startswith("rank 1 (host ") and found[0][3].endswith("): ValueError: boxes")


def test_each_image_and_class_is_fused_alone() -> None:
    members = some_members()
    fused_R7 = fuse_members(members, WBF, 300)
    assert (np.diff(fused_R7[:, 0]) >= 0).all() and 1 not in fused_R7[:, 0]
    weights = np.array([1, 2, 3]) / 3
    for image in (0, 2, 3, 4):
        of_image_R7 = fused_R7[fused_R7[:, 0] == image]
        assert (np.diff(of_image_R7[:, 2]) <= 0).all()
        for label in (0, 1):
            found = of_image_R7[of_image_R7[:, 1] == label]
            rows, weight = [], []
            for member, one in zip(members, weights):
                mine = member.rows_R7
                mine = mine[(mine[:, 0] == image) & (mine[:, 1] == label)].astype(np.float64)
                rows.append(mine)
                weight += [one] * len(mine)
            rows_R7 = np.concatenate(rows)
            boxes_K4, scores_K = WBF(rows_R7[:, 3:], rows_R7[:, 2], np.array(weight), 2.0)
            np.testing.assert_array_equal(found[:, 2], scores_K.astype(np.float32))
            np.testing.assert_array_equal(found[:, 3:], boxes_K4.astype(np.float32))


def test_one_member_alone_keeps_its_scores() -> None:
    rows_R7 = np.array([[0, 0, 0.9, 0, 0, 9, 9], [0, 1, 0.8, 0, 0, 9, 9]], np.float32)
    for fuse in (WBF, partial(hard_suppression, iou=0.5)):
        np.testing.assert_array_equal(
            fuse_members([member_of("alone", rows_R7, 5.0)], fuse, 300), rows_R7
        )


def test_keep_limits_the_boxes_of_an_image() -> None:
    members = some_members()
    all_R7 = fuse_members(members, WBF, 300)
    kept_R7 = fuse_members(members, WBF, 3)
    for image in np.unique(all_R7[:, 0]):
        of_all, of_kept = (rows[rows[:, 0] == image] for rows in (all_R7, kept_R7))
        np.testing.assert_array_equal(of_kept, of_all[:3])
    broken_R7 = np.full((1, 7), np.nan, np.float32)
    broken_R7[0, 0] = 2
    broken = member_of("nan", broken_R7, 3.0)
    assert broken.boxes == 1
    with_it_R7 = fuse_members([*members, broken], WBF, 300)
    np.testing.assert_array_equal(with_it_R7[:, 0], all_R7[:, 0])


def test_no_boxes_at_all_are_no_boxes() -> None:
    nothing = member_of("nothing", np.zeros((0, 7), np.float32), 1.0)
    assert fuse_members([nothing], WBF, 300).shape == (0, 7)


def test_saved_detections_come_back_as_they_were(tmp_path: Path) -> None:
    dataset = five_images()
    rows_R7 = some_members()[0].rows_R7
    write_detections(tmp_path / "a.json", dataset, rows_R7)
    saved = read_saved(tmp_path / "a.json")
    np.testing.assert_allclose(rows_of(saved, dataset), rows_R7, atol=2e-3)
    own = set_of([saved])  # image 1 has no detection: without the set nobody knows of it
    assert [record.image_id for record in own.records] == [100, 102, 103, 104]
    assert own.category_ids == (1, 2)
    np.testing.assert_allclose(rows_of(saved, own)[:, 1:], rows_R7[:, 1:], atol=2e-3)


def test_ids_need_not_be_in_order(tmp_path: Path) -> None:
    dataset = five_images()
    records = [replace(r, image_id=900 - r.image_id) for r in dataset.records]
    turned = DetectionSet(records, ("cat", "dog"), (7, 3), "turned")
    rows_R7 = some_members()[1].rows_R7
    write_detections(tmp_path / "a.json", turned, rows_R7)
    np.testing.assert_allclose(rows_of(read_saved(tmp_path / "a.json"), turned), rows_R7, atol=2e-3)


def test_a_data_set_of_predictions_is_read(tmp_path: Path) -> None:
    entry = {"image_id": 1, "category_id": 2, "bbox": [1, 2, 3, 4], "score": 0.5, "id": 1}
    for name, image in (("a", "cat.jpg"), ("b", "dog.jpg")):
        images = [{"id": 1, "file_name": image}]
        content = {"images": images, "annotations": [entry], "categories": []}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    first, second = (read_saved(tmp_path / f"{name}.json") for name in "ab")
    assert first.box_R4.tolist() == [[1, 2, 4, 6]]
    assert set_of([first, first]).records[0].path == "cat.jpg"
    with raises("detections_of_other_images", str(tmp_path), "/b.json", "'dog.jpg'"):
        set_of([first, second])


def saved_file(path: Path, classes: dict[int, str], category: int) -> Path:
    """A detection; without names for its classes a list, as of `eval --save-detections`."""
    entry = {"image_id": 1, "category_id": category, "bbox": [1, 2, 3, 4], "score": 0.5}
    categories = [{"id": number, "name": name} for number, name in classes.items()]
    named = {"images": [], "annotations": [entry], "categories": categories}
    path.write_text(json.dumps(named if classes else [entry]))
    return path


RED_FIRST, GREEN_FIRST = {1: "red", 2: "green"}, {1: "green", 2: "red"}


@pytest.mark.parametrize(
    ("files", "ids", "labels"),
    [
        ([(RED_FIRST, 1), (GREEN_FIRST, 1)], {1: "red", 2: "green"}, [0, 1]),
        ([(RED_FIRST, 1), (GREEN_FIRST, 2)], {1: "red", 2: "green"}, [0, 0]),
        ([(RED_FIRST, 2), ({1: "blue"}, 1)], {1: "red", 2: "green", 3: "blue"}, [1, 2]),
        ([(RED_FIRST, 2), ({}, 2), ({}, 7)], {1: "red", 2: "green", 7: "7"}, [1, 1, 2]),
        ([({}, 2), ({}, 1)], {1: "1", 2: "2"}, [1, 0]),
        ([(RED_FIRST, 1), (GREEN_FIRST, 1), ({}, 1)], None, []),
    ],
)
def test_classes_of_files_are_matched_by_name(tmp_path, files, ids, labels):
    saved = [
        read_saved(saved_file(tmp_path / f"{place}.json", *each))
        for place, each in enumerate(files)
    ]
    if ids is None:
        with raises("detections_of_other_classes"):
            set_of(saved)
        return
    dataset = set_of(saved)
    assert dict(zip(dataset.category_ids, dataset.class_names)) == ids
    assert [int(rows_of(each, dataset)[0, 1]) for each in saved] == labels


def test_classes_of_a_set_with_names_are_matched_by_name(tmp_path):
    dataset = set_of([read_saved(saved_file(tmp_path / "a.json", GREEN_FIRST, 2))])
    assert rows_of(read_saved(saved_file(tmp_path / "b.json", RED_FIRST, 1)), dataset)[0, 1] == 1
    with raises("detections_of_other_classes"):
        rows_of(read_saved(saved_file(tmp_path / "c.json", {1: "blue"}, 1)), dataset)


@pytest.mark.parametrize(
    "entry",
    [
        {"image_id": 1, "category_id": 2, "bbox": [1, 2, 3, 4]},
        {"image_id": "1", "category_id": 2, "bbox": [1, 2, 3, 4], "score": 0.5},
        {"image_id": 1, "category_id": 2, "bbox": [1, 2, 3], "score": 0.5},
        {"image_id": 1, "category_id": 2, "bbox": [1, 2, 3, float("nan")], "score": 0.5},
        {"image_id": 1, "category_id": 2, "bbox": [1, 2, 3, 4], "score": 1.5},
        [1, 2, 3],
    ],
)
def test_an_entry_that_is_no_detection_is_named(entry, tmp_path: Path) -> None:
    good = {"image_id": 1, "category_id": 2, "bbox": [1, 2, 3, 4], "score": 0.5}
    (tmp_path / "a.json").write_text(json.dumps([good, entry]))
    with raises("not_detections", "a.json"):
        read_saved(tmp_path / "a.json")


def test_files_without_detections_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"info": 1}')
    with raises("not_detections", "a.json"):
        read_saved(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("[")
    with raises("not_json", "b.json"):
        read_saved(tmp_path / "b.json")


def test_detections_of_another_set_are_refused(tmp_path: Path) -> None:
    entry = {"image_id": 55, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5}
    (tmp_path / "a.json").write_text(json.dumps([entry]))
    with raises("detections_of_other_images", str(tmp_path), "/a.json", "55"):
        rows_of(read_saved(tmp_path / "a.json"), five_images())
    (tmp_path / "a.json").write_text(json.dumps([{**entry, "image_id": 100, "category_id": 9}]))
    with raises("detections_of_other_classes", "category 9 is not in test"):
        rows_of(read_saved(tmp_path / "a.json"), five_images())


def test_models_of_other_classes_or_images_are_refused() -> None:
    one = five_images()
    require_same_images("a.yml", one, "b.yml", replace(one, source="elsewhere"))
    require_same_images("a.yml", one, "b.yml", replace(one, class_names=("dog", "cat")))
    with raises("classes_differ", "a.yml", "b.yml", "cow, dog"):
        require_same_images("a.yml", one, "b.yml", replace(one, class_names=("cow", "dog")))
    with raises("validation_sets_differ", "test, 5 images", "4 images"):
        require_same_images("a.yml", one, "b.yml", replace(one, records=one.records[1:]))


def test_scores_are_written_where_truth_is_known(tmp_path: Path) -> None:
    dataset = five_images()
    rows_R7 = np.array([[1, 0, 0.9, 10, 20, 42, 70]], np.float32)  # the object of image 1
    for truth, name in ((dataset, "known"), (None, "unknown")):
        (tmp_path / name).mkdir()
        member = member_of("one", rows_R7, 1.0, truth)
        scores = write_fused(tmp_path / name, dataset, [member], rows_R7)
        assert len(json.loads((tmp_path / name / "detections.json").read_text())) == 1
        if truth is None:
            assert scores is None and not (tmp_path / name / "scores.json").exists()
        else:
            assert scores == json.loads((tmp_path / name / "scores.json").read_text())
            assert scores["members"] == [{"name": "one", **member.scores}]
            assert scores["fused"]["mAP"] == member.scores["mAP"] > 0
