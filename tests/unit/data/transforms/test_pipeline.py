"""Every augmentation: boxes follow pixels, and a sample is a function of its key alone."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError

from ppdist.config.augment import AugmentConfig
from ppdist.config.experiment import load_config
from ppdist.data.image import read_image
from ppdist.data.transforms import pipeline
from ppdist.data.transforms.color import PIXEL_STEPS, hsv
from ppdist.data.transforms.geometry import GeometryParams, random_geometry
from ppdist.data.transforms.pipeline import TrainSamples, reductions
from ppdist.data.types import DetectionSet, ImageRecord, Sample, SampleKey, keyed_generator

REPOSITORY = Path(__file__).resolve().parents[4]
STILL = {"distort": 0, "expand": 0, "crop": 0, "flip": 0, "random_interpolation": False}
MOSAIC = {**STILL, "mosaic": 1.0, "affine": {"scale": 0.4, "translate": 0.1}}
GEOMETRY = {
    "nothing": STILL,
    "flips": {**STILL, "flip": 0.5, "flip_vertical": 0.5},
    "rotate90": {**STILL, "rotate90": 0.8},
    "expand": {**STILL, "expand": 1.0, "expand_most": 2.0},
    "crop": {**STILL, "crop": 1.0},
    "scale": {**STILL, "affine": {"scale": 0.5}},
    "translate": {**STILL, "affine": {"translate": 0.2}},
    "rotate": {**STILL, "affine": {"rotate": 180}},
    "shear": {**STILL, "affine": {"shear": 20}},
    "perspective": {**STILL, "affine": {"perspective": 0.15}},
    "mosaic": {**MOSAIC, "rotate90": 0.5},
    "mosaic of whole images": {**MOSAIC, "mosaic_whole": True},
    "turned mosaic": {**MOSAIC, "rotate90": 0.5},
    "mosaic in perspective": {**MOSAIC, "affine": {"perspective": 0.15, "rotate": 30}},
    "copy_paste": {**STILL, "copy_paste": 1.0, "rotate90": 0.5, "affine": {"scale": 0.3}},
    "copy_paste after a crop": {**STILL, "copy_paste": 1.0, "crop": 1.0, "flip": 0.5},
    "all that hides": {**MOSAIC, "cutmix": 0.5, "copy_paste": 0.5},
}
TURNED = ("rotate", "shear", "perspective", "mosaic in perspective")
CUTS = ("crop", "copy_paste", "copy_paste after a crop", "all that hides")
EFFECTS = ("distort", "mixup", *(step.__name__ for step in PIXEL_STEPS if step is not hsv))
COLOURS = np.array(
    [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 0, 255), (0, 255, 255),
     (255, 255, 255)]
)  # fmt: skip
SIZES = ((200, 160), (161, 241), (120, 90), (330, 247))  # width, height
SIDE = 96


def write_set(folder: Path, zoom: int = 1) -> DetectionSet:
    """Black images, in each a block or two, a colour and a class of their own each, outlined."""
    records, label = [], 0
    for index, (width, height) in enumerate(np.array(SIZES) * zoom):
        rng, pixels = np.random.RandomState(index), np.zeros((height, width, 3), np.uint8)
        boxes, labels = [], []
        for half in range(2 if index else 1):
            w, h = rng.randint(width // 5, width // 3), rng.randint(height // 4, height // 2)
            x, y = half * width // 2 + rng.randint(5, width // 2 - w), rng.randint(5, height - h)
            pixels[y : y + h, x : x + w] = COLOURS[label]
            boxes.append((x, y, x + w, y + h))
            labels.append(label)
            label += 1
        file = folder / f"{index}.png"
        Image.fromarray(pixels).save(file)
        boxes_M4 = np.array(boxes, np.float32)
        outlines: tuple = ()
        if index == 3:  # only its objects are ever pasted
            outlines = tuple((box[[0, 1, 2, 1, 2, 3, 0, 3]].reshape(4, 2),) for box in boxes_M4)
        none_M, area_M = np.zeros(len(boxes), bool), np.ones(len(boxes), np.float32)
        records.append(
            ImageRecord(
                str(file),
                index,
                int(width),
                int(height),
                boxes_M4,
                np.array(labels),
                none_M,
                area_M,
                outlines,
            )
        )
    return DetectionSet(tuple(records), tuple("abcdefg"), tuple(range(7)), "test")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> DetectionSet:
    return write_set(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def large_dataset(tmp_path_factory) -> DetectionSet:
    return write_set(tmp_path_factory.mktemp("large"), zoom=7)


@pytest.fixture(scope="module", autouse=True)
def decoded_once() -> Iterator[None]:
    """Each image of this module is decoded once: hundreds of samples are made of eight."""

    @cache
    def read(*arguments) -> np.ndarray:
        image_HW3 = read_image(*arguments)
        image_HW3.flags.writeable = False  # nor may a sample write into what a cache holds
        return image_HW3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "read_image", read)
        yield


def samples(dataset, augment, resize="letterbox", seed=0, epochs=None, largest=SIDE):
    config = AugmentConfig(**augment)
    reductions_N = reductions(dataset, config, (largest, largest), resize)
    return TrainSamples(
        dataset, "skip", config, seed, resize=resize, epochs=epochs, reductions_N=reductions_N
    )


def extent(seen_HW) -> np.ndarray | None:
    ys, xs = np.nonzero(seen_HW)
    return np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]) if len(ys) else None


def check(sample: Sample, turned: bool, cuts: bool, off: float = 1.6) -> int:
    """Each box lies around what is seen of its colour, and no colour is seen without a box."""
    height, width = sample.image_HW3.shape[:2]
    checked = 0
    image_HW3, colours_C3 = sample.image_HW3.astype(float), COLOURS.astype(float)
    # (a - b)^2 = a^2 - 2ab + b^2, exact for whole numbers and many times as fast
    far_HWC = (image_HW3**2).sum(2)[..., None] - 2 * image_HW3 @ colours_C3.T
    far_HWC += (colours_C3**2).sum(1)
    seen_CHW = [*np.moveaxis(far_HWC < 127**2, 2, 0)]  # more than half of a pixel, beside black
    for label, box in zip(sample.labels_M, sample.boxes_M4):
        if (sample.labels_M == label).sum() > 1:  # an image twice: which of them is where?
            seen_CHW[label][:] = False
            continue
        assert (box[:2] >= 0).all() and (box[2:] <= [width, height]).all()
        left, top, right, bottom = box.astype(int).tolist()
        near = slice(max(0, top - 3), bottom + 4), slice(max(0, left - 3), right + 4)
        found = extent(seen_CHW[label][near])
        assert found is not None, "a box without its block"
        found = found + [near[1].start, near[0].start] * 2
        np.testing.assert_allclose(box, found, atol=3.0 if turned else off)
        checked += 1
        seen_CHW[label][near] = False
    for label, seen_HW in enumerate(seen_CHW):
        # Slivers of a mosaic's images, or what a cut through an object leaves of it.
        assert cuts or seen_HW.sum() < 300, f"class {label} is seen without a box"
    return checked


@pytest.mark.parametrize("resize", ["letterbox", "stretch"])
@pytest.mark.parametrize("name", GEOMETRY)
def test_boxes_follow_their_pixels(dataset, name, resize):
    under_test = samples(dataset, GEOMETRY[name], resize)
    checked = sum(
        check(
            under_test.make(SampleKey(epoch, index, SIDE, 128)),
            turned=name in TURNED,
            cuts=name in CUTS,
        )
        for epoch in range(8)
        for index in range(3)
    )
    assert checked >= 24


@pytest.mark.parametrize("resize", ["letterbox", "stretch"])
@pytest.mark.parametrize("name", ["crop", "rotate90", "scale", "rotate", "mosaic", "copy_paste"])
def test_boxes_follow_the_pixels_of_reduced_images(large_dataset, name, resize):
    augment = {**GEOMETRY[name], "crop_least": 0.6}
    under_test = samples(large_dataset, augment, resize, largest=128)
    config = AugmentConfig(**augment)
    assert (reductions(large_dataset, config, (128, 128), resize) > 1).all()
    cuts, turned = name in CUTS, name in TURNED
    checked = sum(
        check(under_test.make(SampleKey(epoch, index, 128, 128)), turned, cuts, off=2.2)
        for epoch in range(4)
        for index in range(3)
    )
    assert checked >= 12


@pytest.mark.parametrize("name", EFFECTS)
def test_effects_change_pixels_but_no_visible_box(dataset, name):
    still, under_test = samples(dataset, GEOMETRY["flips"]), {**GEOMETRY["flips"], name: 1.0}
    key = SampleKey(0, 1, SIDE, SIDE)
    before, after = still.make(key), samples(dataset, under_test).make(key)
    assert (before.image_HW3 != after.image_HW3).any()
    if name != "erase":  # tested below
        np.testing.assert_array_equal(after.boxes_M4[: len(before.boxes_M4)], before.boxes_M4)


@pytest.mark.parametrize("name", [*GEOMETRY, *EFFECTS, "cutmix", "hsv"])
def test_a_sample_is_a_function_of_its_key_alone(dataset, name):
    augment = GEOMETRY.get(name) or {**STILL, name: (0.1, 0.7, 0.4) if name == "hsv" else 1.0}
    one, other = samples(dataset, augment), samples(dataset, augment)
    key = SampleKey(3, 1, SIDE, SIDE)
    first = one.make(key)
    one.make(SampleKey(2, 2, SIDE, SIDE))
    for again in (one.make(key), other.make(key)):
        for field in ("image_HW3", "boxes_M4", "labels_M"):
            np.testing.assert_array_equal(getattr(again, field), getattr(first, field))
    others = {
        one.make(replace(key, **change)).image_HW3.tobytes()
        for change in ({"epoch": 4}, {"epoch": 5}, {"copy": 1}, {"copy": 2})
    }
    others |= {samples(dataset, augment, seed=1).make(key).image_HW3.tobytes()}
    if name not in ("nothing", "flips", "rotate90", "crop", "copy_paste", "grey"):  # few outcomes
        assert len(others - {first.image_HW3.tobytes()}) >= 3  # plain colours: two may look alike
    elif name not in ("nothing", "grey"):
        assert others - {first.image_HW3.tobytes()}


def test_each_image_is_turned_by_each_quarter(dataset):
    under_test = samples(dataset, {**STILL, "rotate90": 1.0}, "stretch")
    upright = samples(dataset, STILL, "stretch")
    found = set()
    for epoch in range(20):
        turned = under_test.make(SampleKey(epoch, 2, SIDE, SIDE)).image_HW3.astype(int)
        square = upright.make(SampleKey(epoch, 2, SIDE, SIDE)).image_HW3.astype(int)
        off = [np.abs(np.rot90(square, -turn) - turned).mean() for turn in range(4)]
        found.add(int(np.argmin(off)))
        assert min(off) < 2
    assert found == {1, 2, 3}


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """Names of the images that are decoded."""
    names, read = [], pipeline.read_image
    monkeypatch.setattr(
        pipeline,
        "read_image",
        lambda path, *rest: (names.append(Path(path).stem), read(path, *rest))[1],
    )
    return names


def test_copy_paste_without_outlines_decodes_nothing(dataset, opened):
    bare = tuple(replace(record, polygons_M=()) for record in dataset.records)
    under_test = samples(replace(dataset, records=bare), {**STILL, "copy_paste": 1.0})
    still = samples(dataset, STILL)
    for index in range(4):
        key = SampleKey(0, index, SIDE, SIDE)
        np.testing.assert_array_equal(under_test.make(key).image_HW3, still.make(key).image_HW3)
    assert opened == [*"00112233"]  # by either
    pasted = samples(dataset, {**STILL, "copy_paste": 1.0})
    counts = [len(pasted.make(SampleKey(e, 0, SIDE, SIDE)).labels_M) for e in range(20)]
    assert max(counts) > 1


def test_a_mosaic_opens_only_what_is_seen(dataset, opened):
    closer = {**STILL, "mosaic": 1.0, "affine": {"scale": 0.8, "translate": 0.5}}
    under_test = samples(dataset, closer)
    counts = []
    for epoch in range(20):
        opened.clear()
        under_test.make(SampleKey(epoch, 0, SIDE, SIDE))
        counts.append(len(opened))
    assert 1 <= min(counts) < max(counts) == 4


# --- what is on when, and how large images are read ----------------------------------------------


def test_images_mix_in_epoch_window_then_stay_plain():
    config = AugmentConfig(mosaic=1.0, mixup=0.5, cutmix=0.5, copy_paste=0.5, combine_epochs=(2, 5),
                           close_mosaic_epochs=6, plain_epochs=2, hsv=(0.1, 0.1, 0.1))  # fmt: skip
    found = [config.in_epoch(epoch, 10) for epoch in range(10)]
    assert [one.mosaic > 0 for one in found] == [epoch in (2, 3) for epoch in range(10)]
    for one in found:
        assert len({one.mosaic > 0, one.mixup > 0, one.cutmix > 0, one.copy_paste > 0}) == 1
    assert [any(one.hsv) for one in found] == [True] * 8 + [False] * 2
    assert found[9] == AugmentConfig(distort=0, expand=0, crop=0, random_interpolation=False)
    endless = AugmentConfig(mosaic=1.0, mixup=0.5)
    assert endless.in_epoch(10**6, None) is endless
    assert endless.in_epoch(9, 10) is endless


def test_plain_epochs_show_evaluation_input_or_flip(dataset):
    strong = {**MOSAIC, "flip": 0.5, "erase": 1.0, "rotate90": 1.0, "plain_epochs": 1}
    plain, still = samples(dataset, strong, epochs=3), samples(dataset, STILL, epochs=3)
    for index in range(4):
        key = SampleKey(2, index, SIDE, SIDE)
        seen, expected = plain.make(key).image_HW3, still.make(key).image_HW3
        assert np.array_equal(seen, expected) or np.array_equal(seen, expected[:, ::-1])
    with pytest.raises(ValueError, match="plain_epochs: the length of the run is needed"):
        samples(dataset, strong)


def test_a_window_without_epochs_is_refused():
    for window in ((4, 4), (-1, 3)):
        with pytest.raises(ValidationError, match="holds no epoch; write"):
            AugmentConfig(combine_epochs=window)


@pytest.mark.parametrize(
    ("augment", "resize", "expected"),
    [
        # sizes as below at 320 x 320; a crop may show 1/2.83 of a side, so much larger
        ({**STILL}, "letterbox", [2, 1, 8, 4, 1]),
        ({**STILL}, "stretch", [1, 1, 4, 4, 1]),
        ({**STILL, "crop": 1, "crop_least": 0.5}, "letterbox", [1, 1, 2, 1, 1]),
        ({**STILL, "crop": 1, "crop_least": 0.5, "mosaic": 1}, "letterbox", [2, 1, 8, 4, 1]),
        ({**STILL, "crop": 1, "crop_least": 0.5, "mosaic": 1, "close_mosaic_epochs": 1},
         "letterbox", [1, 1, 2, 1, 1]),
        ({**STILL, "crop": 1, "crop_least": 0.5, "mosaic": 1, "copy_paste": 0.1}, "letterbox",
         [1, 1, 2, 1, 1]),
    ],
)  # fmt: skip
def test_images_are_read_as_small_as_any_sample_allows(dataset, augment, resize, expected):
    sizes = ((640, 480), (639, 480), (2560, 1300), (1280, 1280), (0, 0))
    records = [replace(dataset.records[0], width=w, height=h) for w, h in sizes]
    found = reductions(
        replace(dataset, records=records), AugmentConfig(**augment), (320, 320), resize
    )
    assert found.dtype == np.uint8 and found.tolist() == expected


@pytest.mark.parametrize("least", [0.3, 0.8])
def test_no_crop_enlarges_image_beyond_decoded_size(least):
    config, rng = AugmentConfig(crop=1, expand=0, crop_least=least), keyed_generator(5)
    box_14 = np.array([[900, 700, 1000, 800]], np.float32)
    params = GeometryParams.of_image(box_14, 2000, 1600, (1600, 2000))
    found = [
        np.max(random_geometry(params, config, rng).placement("stretch").scale) for _ in range(1000)
    ]
    assert 0.9 * config.most_zoom < max(found) < 1.01 * config.most_zoom


def test_a_turn_of_an_image_counts_for_how_it_is_read(dataset):
    records = [replace(dataset.records[0], width=400, height=1600)]
    for augment, expected in ((STILL, 8), ({**STILL, "rotate90": 0.1}, 4)):
        config = AugmentConfig(**augment)
        found = reductions(replace(dataset, records=records), config, (100, 400), "letterbox")
        assert found.tolist() == [expected]


@pytest.mark.parametrize("strength", ["light", "medium", "strong", "dense"])
def test_every_preset_is_complete_and_fits_recipes(tmp_path, strength):
    preset = REPOSITORY / "configs" / "_base_" / f"augment_{strength}.yml"
    found = []
    for recipe in ("bccd_yolov5n", "bccd_ppyoloe"):
        file = tmp_path / f"{recipe}.yml"
        base = REPOSITORY / "configs" / "examples" / f"{recipe}.yml"
        file.write_text(f"_BASE_: [{base}, {preset}]\n", encoding="utf-8")
        augment = load_config(file).data.augment
        found.append(augment.model_dump() | {"flip_vertical": 0, "random_interpolation": 0})
    assert found[0] == found[1]
