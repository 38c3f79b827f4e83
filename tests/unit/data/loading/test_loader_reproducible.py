"""Every byte of training input is a function of (seed, epoch, index), whoever makes it and when.

One stream, made in the rank itself on one rank from the first step on without a cache, is compared
byte for byte with those of several workers, of four ranks, of a resumed run and of each cache, for
each augmentation on its own and for all of them at once.  Workers cost a fork each, so each
augmentation on its own meets them in the slow run only.
"""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ppdist.config.augment import AffineConfig, AugmentConfig
from ppdist.config.data import DataConfig, SamplingConfig
from ppdist.config.train import MicroBatches
from ppdist.data.datasets.build import read_split
from ppdist.data.image import read_image
from ppdist.data.loading.loader import EvalLoader, TrainLoader
from ppdist.data.loading.sampler import TrainSampler, expected_copies
from ppdist.data.transforms import pipeline
from ppdist.data.transforms.pipeline import reductions
from ppdist.data.types import Batch
from tests.unit.data.loaders import arrays, wait_until_gone
from tests.unit.data.sets import NAMES, coco_config

ROOT = Path(__file__).resolve().parents[4]
TOTAL_BATCH, EPOCHS, SEED = 4, 3, 5
SIZES = ((64, 96), (96, 64), (64, 64))  # multi-scale: one a step
# (width, height): small and large against the input, so that some are decoded reduced.
IMAGES = [
    (64, 48),
    (400, 300),
    (97, 130),
    (640, 200),
    (33, 71),
    (260, 260),
    (120, 90),
    (500, 500),
    (90, 90),
]

PLAIN = dict(distort=0, expand=0, crop=0, flip=0, random_interpolation=False)
EACH = {
    "none of them": {},
    "distort": dict(distort=1),
    "expand": dict(expand=1),
    "crop": dict(crop=1),
    "flip": dict(flip=0.5),
    "flip_vertical": dict(flip_vertical=0.5),
    "random_interpolation": dict(random_interpolation=True),
    "hsv": dict(hsv=(0.1, 0.7, 0.4)),
    "rotate": dict(affine=AffineConfig(rotate=180)),
    "scale": dict(affine=AffineConfig(scale=0.5)),
    "shear": dict(affine=AffineConfig(shear=20)),
    "translate": dict(affine=AffineConfig(translate=0.3)),
    "perspective": dict(affine=AffineConfig(perspective=0.15)),
    "rotate90": dict(rotate90=0.7),
    "blur": dict(blur=0.7),
    "grey": dict(grey=0.5),
    "erase": dict(erase=0.7),
    "mosaic of 4": dict(mosaic=0.8),
    "mosaic of whole images": dict(mosaic=0.8, mosaic_whole=True),
    "mixup": dict(mixup=0.7),
    "cutmix": dict(cutmix=0.7),
    "copy_paste": dict(copy_paste=0.8),
}
TOGETHER = dict(
    distort=0.5,
    expand=0.5,
    crop=0.5,
    crop_least=0.7,
    flip=0.5,
    flip_vertical=0.5,
    random_interpolation=True,
    hsv=(0.1, 0.7, 0.4),
    affine=AffineConfig(rotate=20, scale=0.5, shear=5, translate=0.1, perspective=0.05),
    rotate90=0.3,
    blur=0.3,
    grey=0.3,
    erase=0.3,
    mosaic=0.6,
    mixup=0.4,
    cutmix=0.4,
    copy_paste=0.5,
)
EVERYTHING = {
    "all": TOGETHER,
    "all, mosaic closing": TOGETHER | dict(close_mosaic_epochs=1),
    "all, combined in a window": TOGETHER | dict(combine_epochs=(1, 2)),
    "all, combined in a share": TOGETHER | dict(combine_epochs=(0.0, 0.5), mosaic_whole=True),
    "all, plain at the end": TOGETHER | dict(plain_epochs=1),
    "all, letterboxed": TOGETHER | dict(resize="letterbox"),
}
CASES = EACH | EVERYTHING


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A COCO set with masks; its last image is damaged, the first has no objects."""
    root = tmp_path_factory.mktemp("set")
    (root / "images").mkdir()
    rng = np.random.RandomState(0)
    images, annotations = [], []
    for index, (width, height) in enumerate(IMAGES):
        file = root / "images" / f"{index}.jpg"
        coarse_HW3 = rng.randint(0, 256, (6, 8, 3)).astype(np.uint8)
        Image.fromarray(coarse_HW3).resize((width, height)).save(file, quality=90)
        images.append({"id": index + 1, "file_name": file.name, "width": width, "height": height})
        for number in range(index % 4):
            x, y = rng.randint(0, width // 2), rng.randint(0, height // 2)
            w, h = rng.randint(8, width // 2), rng.randint(8, height // 2)
            outline = [x, y, x + w, y + h // 3, x + w // 2, y + h]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": index + 1,
                    "category_id": (index + number) % 3 + 1,
                    "bbox": [int(x), int(y), int(w), int(h)],
                    "segmentation": [[int(value) for value in outline]],
                }
            )
    damaged = root / "images" / f"{len(IMAGES) - 1}.jpg"
    damaged.write_bytes(damaged.read_bytes()[:300])
    categories = [{"id": n, "name": name} for n, name in enumerate(NAMES, 1)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "set.json").write_text(json.dumps(content), encoding="utf-8")
    return root


def config_of(folder: Path, case: dict, **changes) -> DataConfig:
    augment = PLAIN | case
    changes = {"workers": 0, "resize": augment.pop("resize", "stretch")} | changes
    return coco_config(folder, augment=AugmentConfig(**augment), **changes)


Sample = tuple[int, str, bytes, bytes, int]


def samples_of(batch: Batch) -> list[Sample]:
    """Position, digest of the pixels, boxes, labels and seed of each image of a micro-batch."""
    images, boxes, labels, mask, index, *_, seeds = arrays(batch)
    return [
        (
            int(index[one]),
            f"{images[one].shape} {hashlib.sha256(images[one].tobytes()).hexdigest()}",
            boxes[one][mask[one] > 0].tobytes(),
            labels[one][mask[one] > 0].tobytes(),
            int(seeds[one]),
        )
        for one in range(len(index))
        if index[one] >= 0
    ]


def stream(
    config: DataConfig,
    *,
    world: int = 1,
    accumulate: int = 1,
    first: int = 0,
    seed: int = SEED,
    sizes: tuple[tuple[int, int], ...] = SIZES,
) -> list[list[Sample]]:
    """The samples of every step from `first` on, of all ranks, in the order of the epoch."""
    dataset = read_split(config, "train", 3, masks=True)
    of_ranks: list[list[list[Sample]]] = []
    for rank in range(world):
        sampler = TrainSampler(
            dataset_size=len(dataset.records),
            batches=MicroBatches(TOTAL_BATCH, TOTAL_BATCH // world // accumulate, spread=False),
            rank=rank,
            world=world,
            seed=seed,
            start_step=first,
            end_step=first,
            sizes=sizes,
            copies_N=expected_copies(dataset, config.sampling, None),
        )
        sampler = replace(sampler, end_step=EPOCHS * sampler.steps_per_epoch)
        with closing(TrainLoader(dataset, config, sampler, seed=seed, epochs=EPOCHS)) as loader:
            of_rank = [samples_of(batch) for batch in loader]
        counts = [sampler.count(step) for step in range(first, sampler.end_step)]
        ends = [*itertools.accumulate(counts)]
        of_ranks.append([of_rank[end - count : end] for count, end in zip(counts, ends)])
    # Micro-batch m of rank r has number m * world + r in its step.
    return [
        [sample for of_all in itertools.zip_longest(*step, fillvalue=[]) for share in of_all
         for sample in share]
        for step in zip(*of_ranks)
    ]  # fmt: skip


_REFERENCES: dict[str, list[list[Sample]]] = {}


def reference(folder: Path, name: str) -> list[list[Sample]]:
    """The stream of one rank without workers and cache."""
    if name not in _REFERENCES:
        _REFERENCES[name] = stream(config_of(folder, CASES[name]))
    return _REFERENCES[name]


FEW = ("all",)
RESUMED = ("all", "all, combined in a share")  # which begins and ends within an epoch
MIDDLE = 4  # of an epoch: each has three steps


def together(*ways) -> list:
    """(name, way) of all augmentations at once; their variants are slow."""
    return [
        pytest.param(name, way, marks=() if name in FEW else pytest.mark.slow)
        for name in EVERYTHING
        for way in ways
    ]


@pytest.mark.parametrize("name", EACH)
def test_ranks_resume_and_cache_change_no_byte(folder, name):
    """At once here; one by one, below, for all augmentations together."""
    ours = stream(config_of(folder, EACH[name], cache="ram"), world=4, first=MIDDLE)
    assert ours == reference(folder, name)[MIDDLE:]


@pytest.mark.parametrize(
    ("name", "workers"),
    [*together(4, 1), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in EACH)],
)
def test_workers_change_no_byte(folder, name, workers):
    assert stream(config_of(folder, CASES[name], workers=workers)) == reference(folder, name)


@pytest.mark.parametrize(("name", "shared"), together((4, 1), (2, 2)))
def test_ranks_and_accumulation_change_no_byte(folder, name, shared):
    world, accumulate = shared
    ours = stream(config_of(folder, CASES[name]), world=world, accumulate=accumulate)
    assert ours == reference(folder, name)


@pytest.mark.parametrize(
    "name",
    [
        name if name in RESUMED else pytest.param(name, marks=pytest.mark.slow)
        for name in EVERYTHING
    ],
)
def test_run_resumed_mid_epoch_gets_same_bytes(folder, name):
    resumed = stream(config_of(folder, CASES[name]), first=MIDDLE)
    assert resumed == reference(folder, name)[MIDDLE:]


@pytest.fixture
def decoded(monkeypatch) -> Counter[str]:
    """Counts how often each good image is decoded in this process."""
    times: Counter[str] = Counter()

    def counting(path: str, *rest):
        image_HW3 = read_image(path, *rest)
        times[Path(path).name] += 1
        return image_HW3

    monkeypatch.setattr(pipeline, "read_image", counting)
    return times


@pytest.mark.parametrize(("name", "cache"), together("ram", "disk"))
def test_caches_change_no_byte(folder, name, cache, tmp_path, decoded, monkeypatch):
    expected = reference(folder, name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = config_of(folder, CASES[name], cache=cache)
    decoded.clear()
    assert stream(config) == expected
    assert set(decoded.values()) == {1}, "an image that is kept was decoded again"
    if cache == "disk":
        decoded.clear()
        assert stream(config) == expected
        assert not decoded, "the second run has all images from the first"


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["balanced", "difficulty"])
def test_repeated_images_keep_stream_reproducible(folder, sampling, tmp_path, monkeypatch):
    often = SamplingConfig(name=sampling, balance_threshold=0.9)
    alone = stream(config_of(folder, TOGETHER, sampling=often))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    changes = {"cache": "disk", "sampling": often}
    config = config_of(folder, TOGETHER, **changes)
    assert stream(config, world=4) == alone
    config = config_of(folder, TOGETHER, workers=2, **changes)
    assert stream(config, world=2, accumulate=2, first=5) == alone[5:]


def test_copies_of_an_image_in_one_epoch_look_different(folder):
    often = SamplingConfig(name="balanced", balance_threshold=1.0)
    steps = stream(config_of(folder, EACH["rotate"], sampling=often), sizes=SIZES[:1])
    of_epoch = [sample for step in steps[: len(steps) // EPOCHS] for sample in step]
    taken_twice = (0, len(IMAGES) - 1)  # the first also stands in for the damaged one
    looks = [(index, pixels) for index, pixels, *_ in of_epoch if index not in taken_twice]
    assert len({index for index, _ in looks}) < len(looks), "none came twice"
    assert len(set(looks)) == len(looks)


@pytest.mark.parametrize("name", [name for name in EACH if EACH[name]])
def test_each_augmentation_shows_in_the_stream(folder, name):
    assert reference(folder, name) != reference(folder, "none of them")


def test_another_seed_gives_other_bytes(folder):
    other = stream(config_of(folder, TOGETHER), seed=SEED + 1)
    assert other != reference(folder, "all")


def evaluation(
    folder: Path, world: int, shape_multiple: int | None, shape_pad: float = 0.0
) -> dict[int, np.ndarray]:
    """Position -> uint8 [3, H, W], the image itself without what lies beside it."""
    config = coco_config(folder, workers=0, resize="letterbox")
    dataset = read_split(config, "val", 3)
    found: dict[int, np.ndarray] = {}
    for rank in range(world):
        loader = EvalLoader(
            dataset,
            config,
            image_size=(96, 128),
            batch_size=2,
            rank=rank,
            world=world,
            shape_multiple=shape_multiple,
            shape_pad=shape_pad,
        )
        with closing(loader):
            for batch in loader:
                for position, index in enumerate(batch.image_index_B.numpy().tolist()):
                    if index < 0:  # in place of the damaged image
                        continue
                    assert index not in found
                    record = dataset.records[index]
                    top, left = batch.offset_B2[position].numpy().astype(int)
                    tall, wide = np.rint(
                        batch.scale_B2[position].numpy() * [record.height, record.width]
                    ).astype(int)
                    image = batch.images_B3HW[position].numpy()
                    found[index] = image[:, top : top + tall, left : left + wide]
    return found


def test_rectangular_evaluation_pixels_equal_square(folder):
    square = evaluation(folder, 1, None)
    assert sorted(square) == list(range(len(IMAGES) - 1))  # without the damaged one
    for world, pad in ((1, 0.0), (3, 0.0), (1, 0.5), (3, 0.5)):
        rectangular = evaluation(folder, world, 32, pad)
        assert sorted(rectangular) == sorted(square)
        for index, image in rectangular.items():
            np.testing.assert_array_equal(image, square[index])


def test_reproducible_cases_include_reduced_images(folder):
    dataset = read_split(config_of(folder, TOGETHER), "train", 3)
    largest = max(height for height, _ in SIZES), max(width for _, width in SIZES)
    for augment in (EACH["mosaic of 4"], TOGETHER):
        factors_N = reductions(dataset, AugmentConfig(**PLAIN | augment), largest, "stretch")
        assert len(set(factors_N.tolist())) > 1


FRESH = """
import sys
from pathlib import Path
from tests.unit.data.loaders import loader
from tests.unit.data.loading.test_loader_reproducible import TOGETHER, config_of, digest, stream
if sys.argv[2] == "return":
    print(digest(stream(config_of(Path(sys.argv[1]), TOGETHER, workers=2))))
one = loader(Path(sys.argv[1]), workers=2, end=10**6)
batches = iter(one)
next(batches)
print(*one.worker_ids, flush=True)
if sys.argv[2] == "raise":
    raise ValueError("the step failed")
"""


def digest(steps: list[list[Sample]]) -> str:
    return hashlib.sha256(repr(steps).encode()).hexdigest()


@pytest.fixture(scope="module", params=["raise", pytest.param("return", marks=pytest.mark.slow)])
def fresh(request, folder) -> tuple[list[str], list[int]]:
    """Of another process that ended amid a run, by an error or not: what it saw before in the
    second case, and its workers then."""
    ended = subprocess.run(
        [sys.executable, "-c", FRESH, str(folder), request.param],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ended.returncode == (1 if request.param == "raise" else 0), ended.stderr
    *said, workers = ended.stdout.splitlines()
    return said, [int(process) for process in workers.split()]


@pytest.mark.slow
@pytest.mark.parametrize("fresh", ["return"], indirect=True)
def test_other_process_and_hash_seed_give_same_bytes(folder, fresh):
    assert fresh[0][-1] == digest(reference(folder, "all"))


def test_a_process_that_ends_in_mid_run_leaves_no_worker(fresh):
    assert len(fresh[1]) == 2
    wait_until_gone(fresh[1])
