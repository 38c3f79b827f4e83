"""Tar shards: plain tars that WebDataset's readers open, and ours read by offset."""

import io
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from ppdist.common.addresses import place_in_shard
from ppdist.config.data import DataConfig, SplitConfig
from ppdist.data.checks.before_training import check_before_training
from ppdist.data.checks.validate import validate
from ppdist.data.datasets.annotations import ignore_issue
from ppdist.data.datasets.build import read_raw, read_split
from ppdist.data.datasets.convert import convert
from ppdist.data.image import read_header, read_image
from ppdist.data.types import RawSet
from ppdist.storage.files import STORAGE
from tests.errors import raises
from tests.forked import run_here
from tests.unit.data.loaders import assert_equal, loader
from tests.unit.data.sets import (
    coco_config,
    coco_content,
    sharded,
    write_coco,
    write_images,
    write_json,
)

_KEY = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # WebDataset's own


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """Roots of a set as files and in shards; to be read only."""
    root = tmp_path_factory.mktemp("set")
    write_coco(root / "files", 13)
    sharded(root / "files", root / "shards")
    return root / "files", root / "shards"


def test_shards_are_plain_tars_of_samples_with_keys(pair):
    files, root = pair
    tars = sorted((root / "images").glob("*.tar"))
    assert [tar.name for tar in tars] == [f"train-{n:06d}.tar" for n in range(len(tars))]
    samples: dict[str, dict[str, bytes]] = {}
    for path in tars:
        with tarfile.open(path) as tar:
            for member in tar:
                key, suffix = _KEY.match(member.name).groups()
                samples.setdefault(key, {})[suffix] = tar.extractfile(member).read()
    assert len(tars) == 5 and len(samples) == 13
    content = json.loads((files / "set.json").read_text())
    for image in content["images"]:
        sample = samples[image["file_name"].removesuffix(".jpg")]
        assert sample["jpg"] == (files / "images" / image["file_name"]).read_bytes()
        said = json.loads(sample["json"])
        assert said["images"] == [image]
        boxes = [e["bbox"] for e in content["annotations"] if e["image_id"] == image["id"]]
        assert [each["bbox"] for each in said["annotations"]] == boxes


def test_same_set_gives_the_same_bytes(pair, tmp_path):
    sharded(pair[0], tmp_path)
    for file in (pair[1] / "images").iterdir():
        assert (tmp_path / "images" / file.name).read_bytes() == file.read_bytes()


def everything(raw: RawSet) -> list:
    images = [
        (i.image_id, i.width, i.height, dict(i.extra), [
            (t.box, t.label, t.crowd, t.area, dict(t.extra), [p.tolist() for p in t.polygons])
            for t in i.objects
        ])
        for i in raw.images
    ]  # fmt: skip
    return [images, raw.class_names, raw.category_ids, dict(raw.extra), raw.class_extras]


def test_every_annotation_survives_shards(tmp_path):
    names = write_images(tmp_path / "images" / "sub", 3)
    content = coco_content([f"sub/{name}" for name in names])
    content["info"] = {"year": 2026}
    content["images"][1]["flickr_url"] = "x"
    content["annotations"][0] |= {
        "segmentation": [[1.0, 2.0, 9.0, 2.0, 9.0, 8.0]], "area": 4.5, "iscrowd": 1, "odd": [1]
    }  # fmt: skip
    content["annotations"][1]["segmentation"] = {"counts": "abc", "size": [48, 64]}
    content["categories"][0]["supercategory"] = "cell"
    write_json(tmp_path, content)
    config = coco_config(tmp_path)
    config_of_shards = sharded(tmp_path, tmp_path / "out")
    raw, again = (read_raw(each, "train", ignore_issue) for each in (config, config_of_shards))
    (first, *_), (other, *_) = everything(raw), everything(again)
    for one, two in zip(first, other):
        areas = [(*t[:3], t[4:]) for t in one[4]], [(*t[:3], t[4:]) for t in two[4]]
        assert one[:4] == two[:4] and areas[0] == areas[1]
    assert everything(raw)[1:] == everything(again)[1:]
    assert everything(again)[0][1][4][0][3] == 4.5
    # And back into files, which have their own names again.
    lines = convert(again, "coco", tmp_path / "back", images="copy", split="train")
    assert (
        lines == []
        and (tmp_path / "back/images/train/000.jpg").read_bytes()
        == (tmp_path / "images/sub/000.jpg").read_bytes()
    )


def test_names_become_keys_that_differ(tmp_path):
    images = tmp_path / "images"
    write_images(images, 3)
    for old, new in (("000.jpg", "a.b.jpg"), ("001.jpg", "a_b.jpg"), ("002.jpg", "a_b.JPG")):
        (images / old).rename(images / new)
    write_json(tmp_path, coco_content(["a.b.jpg", "a_b.jpg", "a_b.JPG"]))
    raw = read_raw(coco_config(tmp_path), "train", ignore_issue)
    lines = convert(raw, "coco", tmp_path / "out", images="copy", split="train", shard_bytes=10**6)
    with tarfile.open(tmp_path / "out/images/train/train-000000.tar") as tar:
        keys = [name.partition(".")[0] for name in tar.getnames()]
    assert len(set(keys)) == 3 and len(keys) == 6 and any("dots in their names" in x for x in lines)


def test_images_and_batches_are_those_of_files(pair):
    files, root = pair
    one, other = (read_split(coco_config(each), "train", 3) for each in pair)
    for a, b in zip(one.records, other.records, strict=True):
        assert ".tar/" in b.path and read_header(a.path) == read_header(b.path, STORAGE)
        np.testing.assert_array_equal(read_image(a.path), read_image(b.path, opener=STORAGE))
        assert STORAGE.identity_of(b.path).bytes == Path(a.path).stat().st_size
    assert_equal(loader(root), loader(files))
    assert_equal(loader(root, workers=1), loader(files, start=0))
    assert_equal(loader(root, start=3), list(loader(files))[6:])
    for rank in range(2):
        assert_equal(loader(root, rank=rank, world=2), loader(files, rank=rank, world=2))


def test_member_is_a_file_of_its_own(pair):
    path = read_split(coco_config(pair[1]), "train").records[2].path
    content = (pair[0] / "images" / "002.jpg").read_bytes()
    with STORAGE.open(path) as file:
        assert file.read(4) == content[:4]
        assert file.seek(0, io.SEEK_END) == len(content) and file.read() == b""
        assert file.seek(-3, io.SEEK_CUR) == len(content) - 3 and file.read() == content[-3:]
        assert file.seek(7) == 7 and file.read(5) == content[7:12]
    with pytest.raises(OSError, match="too large"):
        STORAGE.read(path, 10)


def test_check_finds_the_same_in_shards(pair, checked_here):
    config = coco_config(pair[1])
    report = validate(config, decode=True, workers=1)
    assert report.errors == 0
    checked = check_before_training(config, read_split(config, "train"), None, 1)
    assert not checked.train.unreadable


def test_index_of_other_shards_is_noticed(pair, tmp_path):
    config = sharded(pair[0], tmp_path)
    records = read_split(config, "train").records
    index = tmp_path / "images" / "index.csv"
    good = index.read_text()
    index.write_text(re.sub(r"^(001.jpg,[^,]*),\d+", r"\1,1024", good, flags=re.M))
    read_split(config, "train")
    with raises("image_unreadable", "index.csv"):
        read_image(records[1].path, opener=STORAGE)
    assert read_image(records[0].path, opener=STORAGE).shape == (48, 64, 3)
    index.write_text("\n".join(line for line in good.splitlines() if not line.startswith("001")))
    with raises("image_missing", "train-000000.tar/001.jpg"):
        read_split(config, "train")


@pytest.mark.parametrize(
    "text", ["", "a,b\n", "name,shard,offset,size\na.jpg,b.tar,x,1\n",
             "name,shard,offset,size\na.jpg,b.tar,-1,1\n",
             "name,shard,offset,size\na.jpg,b.tar,1,1\na.jpg,b.tar,1,1\n", None]
)  # fmt: skip
def test_damaged_or_absent_index_is_one_message(text, pair, tmp_path):
    config, index = sharded(pair[0], tmp_path), tmp_path / "images" / "index.csv"
    index.unlink() if text is None else index.write_text(text)
    with raises("folder_unreadable", "index.csv"):
        read_split(config, "train")


def test_folder_called_tar_is_a_folder(tmp_path):
    root = tmp_path / "set.tar"
    config = write_coco(root, 3)
    assert place_in_shard(str(root / "images" / "000.jpg")) is None
    path = read_split(config, "train").records[0].path
    assert read_image(path, opener=STORAGE).shape == (48, 64, 3)


def test_command_writes_shards_and_says_how_to_use_them(tmp_path):
    write_coco(tmp_path / "in", 5)
    words = ("convert", tmp_path / "in", "--out", tmp_path / "out", "--shards")
    for wrong in (("1MB", "--to", "yolo"), ("1MB", "--to", "coco", "--image-files", "link")):
        refused = run_here("data", *words, *wrong)
        assert refused.returncode == 2 and "--to coco" in refused.stderr
    assert "such as 256MB" in run_here("data", *words, "many", "--to", "coco").stderr
    done = run_here("data", *words, "1MB", "--to", "coco")
    assert done.returncode == 0 and "images: images/train" in done.stdout
    split = SplitConfig(images="images/train", annotations="annotations/instances_train.json")
    config = DataConfig(root=f"{tmp_path}/out", train=split, val=split)
    assert len(read_split(config, "train").records) == 4  # one validates
