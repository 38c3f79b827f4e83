"""The order of training and evaluation: exactly once, or as often as asked, whoever shares it."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from ppdist.config.train import MicroBatches, takers
from ppdist.data.loading.sampler import (
    EvalSampler,
    TrainSampler,
    draw_epoch_order,
    rectangular_shapes,
)
from ppdist.data.transforms.geometry import letterbox

SIZES = ((320, 320), (256, 288), (384, 352))
# (images, world, accumulate, batch per card)
SHAPES = [
    (205, 2, 1, 4),
    (205, 1, 2, 4),
    (7, 4, 2, 1),
    (1, 3, 1, 2),
    (16, 2, 2, 4),
    (17, 2, 2, 4),
    (100, 3, 1, 7),
    (31, 8, 1, 2),
    (64, 1, 1, 64),
    (9, 1, 1, 16),
    (129, 4, 4, 2),
]


def sampler(
    images, world=1, accumulate=1, batch=4, rank=0, seed=3, start=0, end=10**6, sizes=SIZES
) -> TrainSampler:
    return TrainSampler(
        dataset_size=images,
        batches=MicroBatches(world * accumulate * batch, batch, spread=False),
        rank=rank,
        world=world,
        seed=seed,
        start_step=start,
        end_step=end,
        sizes=sizes,
    )


def ranks(images, world, accumulate, batch) -> list[TrainSampler]:
    return [sampler(images, world, accumulate, batch, rank) for rank in range(world)]


def keys_of_step(samplers, step) -> list[tuple[int, int]]:
    """Index and copy, of all ranks and micro-batches, padding left out."""
    keys = [key for one in samplers for micro in one.micro_batches(step) for key in micro]
    return sorted((key.index, key.copy) for key in keys if key.index >= 0)


def indices_of_step(samplers, step) -> list[int]:
    return [index for index, _ in keys_of_step(samplers, step)]


@pytest.mark.parametrize(("images", "world", "accumulate", "batch"), SHAPES)
def test_every_image_comes_exactly_once_in_every_epoch(
    images, world, accumulate, batch, record_property
):
    samplers = ranks(images, world, accumulate, batch)
    steps = samplers[0].steps_per_epoch
    assert steps == -(-images // (world * accumulate * batch))
    for epoch in range(3):
        seen = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            seen += indices_of_step(samplers, step)
        assert sorted(seen) == list(range(images))
    record_property("figure", "0 images missed or doubled in 3 epochs")


# (images of the set, of a step, of a micro-batch)
STEPS = [(205, 24, 2), (7, 4, 1), (1, 6, 2), (17, 16, 4), (100, 21, 7), (31, 16, 16), (64, 12, 3)]


def shared(images, total, micro, spread, world) -> list[TrainSampler]:
    batches = MicroBatches(total, micro, spread)
    return [replace(sampler(images, rank=r), batches=batches, world=world) for r in range(world)]


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("images", "total", "micro"), STEPS)
def test_any_number_of_ranks_shares_same_micro_batches(images, total, micro, spread):
    (alone,) = shared(images, total, micro, spread, 1)
    for world in (2, 3, 4, 5):
        ranks_W = shared(images, total, micro, spread, world)
        for step in range(2 * alone.steps_per_epoch):
            of_W = [one.micro_batches(step) for one in ranks_W]
            assert [one.count(step) for one in ranks_W] == [*map(len, of_W)]
            wanted = alone.micro_batches(step)
            if spread:  # every rank has a share of each, as even as can be
                found = [[key for share in shares for key in share] for shares in zip(*of_W)]
                sizes = [[sum(key.index >= 0 for key in share) for share in each] for each in of_W]
                assert all(max(each) - min(each) <= 1 for each in zip(*sizes))
            else:  # one after the other, each whole
                found = [of_W[at % world][at // world] for at in range(len(wanted))]
                idle = max(0, world - len(wanted))
                assert [*map(len, of_W)].count(1) >= idle
                found += [of_W[-1 - at][0] for at in range(idle)]
            real = [[key for key in keys if key.index >= 0] for keys in found]
            assert [keys for keys in real if keys] == wanted
            assert all(len(keys) <= micro for keys in wanted)


# (pieces, speeds of the ranks, pieces of each)
SHARES = [
    (8, (1, 1), (4, 4)),
    (3, (1, 1), (2, 1)),  # of equal ranks the lower first
    (2, (1, 1, 1), (1, 1, 0)),
    (8, (1, 0.5), (6, 2)),  # 6 and 4 in half units; 5 and 3 would take 6
    (8, (2, 2, 1), (4, 3, 1)),
    (10, (2, 2, 1), (4, 4, 2)),
    (8, (1, 0.01), (7, 1)),  # one, if there are enough
    (2, (1, 1, 3), (0, 0, 2)),
    (0, (1, 2), (0, 0)),
]


@pytest.mark.parametrize(("pieces", "speeds", "expected"), SHARES)
def test_micro_batches_are_shared_by_speed(pieces, speeds, expected):
    found = takers(pieces, speeds)
    assert tuple(map(found.count, range(len(speeds)))) == expected


@pytest.mark.parametrize("pieces", range(3, 11))
def test_no_other_shares_end_sooner(pieces):
    speeds = 1.0, 0.7, 0.3

    def ends(counts):
        return max(count / speed for count, speed in zip(counts, speeds))

    found = takers(pieces, speeds)
    others = itertools.product(range(1, pieces + 1), repeat=3)
    least = min(ends(counts) for counts in others if sum(counts) == pieces)
    assert ends([found.count(rank) for rank in range(3)]) == least


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(("images", "total", "micro"), STEPS)
def test_uneven_shares_hold_the_same_micro_batches(images, total, micro, spread):
    (alone,) = shared(images, total, micro, spread, 1)
    speeds = 1.0, 0.2, 3.0
    ranks_W = shared(images, total, micro, spread, 3)
    ranks_W = [replace(one, batches=replace(one.batches, speeds=speeds)) for one in ranks_W]
    for step in range(2 * alone.steps_per_epoch):
        wanted = alone.micro_batches(step)
        found = [[] for _ in wanted]
        for one in ranks_W:
            own, numbers = one.micro_batches(step), one.numbers(step)
            assert one.count(step) == len(own) == len(numbers)
            for number, keys in zip(numbers, own):
                real = [key for key in keys if key.index >= 0]
                if real:
                    found[number] += real
        assert found == wanted
        sizes = [one.count(step) for one in ranks_W]
        assert spread or sizes[2] >= max(sizes)


def test_the_length_is_the_number_of_micro_batches():
    for one in shared(50, 6, 2, False, 2):
        assert len(list(replace(one, start_step=4, end_step=11))) == (13 if one.rank == 0 else 7)
        assert len(replace(one, start_step=4, end_step=11)) == (13 if one.rank == 0 else 7)


@pytest.mark.parametrize("images, world, accumulate, batch", SHAPES)
def test_split_micro_batches_keep_images_of_step(images, world, accumulate, batch):
    whole = ranks(images, world, accumulate, batch)
    for parts in (2, 4):
        samplers = [replace(one, parts=parts, end_step=5) for one in whole]
        for step in range(2 * whole[0].steps_per_epoch):
            assert indices_of_step(samplers, step) == indices_of_step(whole, step)
        micro = [keys for one in samplers for keys in one.micro_batches(0)]
        assert max(map(len, micro)) <= -(-batch // parts)
        assert len(samplers[0]) == len([*samplers[0]])


def test_epochs_are_different_permutations_and_seeds_too():
    orders = [draw_epoch_order(50, 0, 0), draw_epoch_order(50, 0, 1), draw_epoch_order(50, 1, 0)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_the_order_is_the_one_of_this_release():
    # A change of it would break the order of every run that is resumed.
    assert draw_epoch_order(8, 7, 2).tolist() == [5, 2, 4, 3, 6, 0, 1, 7]


# --- images that come more often -----------------------------------------------------------------

COPIES_N = np.array([0.25, 1.0, 2.5, 0.0, 1.75, 3.0, 1.1, 0.4])  # together 10


def test_repeats_are_numbered_in_equal_length_epochs():
    for world, accumulate, batch in [(1, 1, 4), (2, 1, 2), (3, 2, 1), (1, 1, 64)]:
        samplers = [replace(one, copies_N=COPIES_N) for one in ranks(8, world, accumulate, batch)]
        steps = samplers[0].steps_per_epoch
        assert samplers[0].epoch_size == 10
        assert steps == -(-10 // (world * accumulate * batch))
        for epoch in range(4):
            seen = []
            for step in range(epoch * steps, (epoch + 1) * steps):
                seen += keys_of_step(samplers, step)
            times = Counter(index for index, _ in seen)
            assert len(seen) == 10 and len(set(seen)) == 10, "a sample comes twice"
            for index, wanted in enumerate(COPIES_N):
                assert times[index] in (np.floor(wanted), np.ceil(wanted))
            assert set(seen) == {(i, copy) for i in times for copy in range(times[i])}


def test_repeats_fall_in_same_steps_on_any_ranks():
    alone = replace(sampler(8, batch=4), copies_N=COPIES_N)
    shared = [replace(one, copies_N=COPIES_N) for one in ranks(8, 2, 2, 1)]
    for step in range(9):
        assert keys_of_step(shared, step) == keys_of_step([alone], step)


def test_order_of_repeats_matches_this_release():
    # A change of it would break the order of every run that is resumed.
    (keys,) = replace(sampler(8, batch=10, seed=7), copies_N=COPIES_N).micro_batches(2)
    assert [(key.index, key.copy) for key in keys] == [
        (6, 0), (5, 1), (4, 1), (2, 1), (7, 0), (4, 0), (2, 0), (5, 2), (5, 0), (1, 0)
    ]  # fmt: skip


# --- sizes ---------------------------------------------------------------------------------------


def test_ranks_share_size_per_step_using_every_size():
    samplers = ranks(205, 4, 2, 2)
    sizes = []
    for step in range(60):
        keys = [key for one in samplers for micro in one.micro_batches(step) for key in micro]
        of_step = {(key.height, key.width) for key in keys}
        assert len(of_step) == 1
        sizes += of_step
    assert set(sizes) == set(SIZES)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("images", [1, 4, 13])
def test_evaluation_sees_each_image_once_without_padding(images, world):
    seen = []
    for rank in range(world):
        one = EvalSampler(images, 2, rank, world, (32, 64))
        batches = list(one)
        assert len(batches) == len(one)
        assert all(1 <= len(keys) <= 2 for keys in batches)
        seen += [key.index for keys in batches for key in keys]
    assert sorted(seen) == list(range(images))


# --- rectangular inputs --------------------------------------------------------------------------

IMAGES_HW = (
    (480, 640), (640, 480), (100, 1000), (333, 500), (500, 333), (640, 640), (1, 9), (0, 0)
)  # fmt: skip


def test_an_input_is_no_larger_than_its_image_needs():
    shapes = rectangular_shapes(IMAGES_HW, (320, 320), 32).tolist()
    assert shapes == [
        [256, 320], [320, 256], [32, 320], [224, 320], [320, 224], [320, 320], [64, 320], [320, 320]
    ]  # fmt: skip


def extent(placement) -> tuple[int, int]:
    left, top, right, bottom = placement.target
    return bottom - top, right - left


def test_an_input_that_is_no_multiple_is_never_exceeded():
    shapes_N2 = rectangular_shapes(IMAGES_HW, (330, 330), 32)
    assert (shapes_N2 <= 330).all() and shapes_N2[0].tolist() == [256, 330]


def padded_by_the_formula(height, width, size, stride, pad):
    """Input, image in it and where it starts, each (vertical, horizontal), of exact fractions."""
    scale = min(Fraction(size[0], height), Fraction(size[1], width))
    exact = [side * scale for side in (height, width)]
    shape = [math.ceil(side / stride + pad) * stride for side in exact]
    inside = [max(1, math.floor(side + Fraction(1, 2))) for side in exact]
    return shape, inside, [(whole - part) // 2 for whole, part in zip(shape, inside)]


def test_padded_inputs_equal_yolov5s_formula():
    """ceil(side / stride + 1/2) strides; the image as large as in a square input, in the middle."""
    sizes_N2 = np.random.default_rng(1).integers(1, 2000, (1500, 2)).tolist()
    sizes_N2 += [[480, 640], [432, 640], [433, 640], [640, 640], [333, 500], [1, 9]]
    half = Fraction(1, 2)
    for size, stride in [((640, 640), 32), ((1280, 1280), 64), ((384, 640), 32)]:
        shapes_N2 = rectangular_shapes(sizes_N2, size, stride, 0.5)
        for (height, width), shape in zip(sizes_N2, shapes_N2.tolist()):
            wanted = padded_by_the_formula(height, width, size, stride, half)
            placed = letterbox(width, height, (shape[0], shape[1]), size)
            left, top, _, _ = placed.target
            assert (shape, [*extent(placed)], [top, left]) == wanted
            assert extent(placed) == extent(letterbox(width, height, size))
    at_coco = rectangular_shapes([[480, 640], [432, 640], [433, 640], [0, 0]], (640, 640), 32, 0.5)
    assert at_coco.tolist() == [[512, 672], [448, 672], [480, 672], [672, 672]]


def batches_of(images_hw, batch_size, world):
    """(shape, indices) of every batch of every rank."""
    shapes_N2 = rectangular_shapes(images_hw, (320, 320), 32)
    found = []
    for rank in range(world):
        one = EvalSampler(len(images_hw), batch_size, rank, world, (320, 320), shapes_N2)
        batches = list(one)
        assert len(batches) == len(one)
        for keys in batches:
            shape = {(key.height, key.width) for key in keys}
            assert len(shape) == 1 and 1 <= len(keys) <= batch_size
            assert all((key.height, key.width) == tuple(shapes_N2[key.index]) for key in keys)
            found.append((*shape, tuple(key.index for key in keys)))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 40])
def test_rectangular_batches_are_equal_on_any_ranks(world):
    images_hw = IMAGES_HW * 5
    found = batches_of(images_hw, 4, world)
    assert sorted(index for _, keys in found for index in keys) == list(range(len(images_hw)))
    assert sorted(found) == sorted(batches_of(images_hw, 4, 1))


def test_largest_inputs_come_first_to_test_memory():
    pixels = [shape[0] * shape[1] for shape, _ in batches_of(IMAGES_HW * 5, 4, 1)]
    assert pixels == sorted(pixels, reverse=True)


def test_the_last_steps_have_one_size():
    one = replace(sampler(20), last_from=6, last_size=(48, 80))
    assert [one.size_of(step) for step in range(6)] == [sampler(20).size_of(s) for s in range(6)]
    assert {one.size_of(step) for step in range(6, 20)} == {(48, 80)}
    assert (48, 80) in one.every_size and (48, 80) not in sampler(20).every_size


@pytest.mark.parametrize(
    ("images", "spread", "shares"),
    [
        (8, False, [[1.0, 1.0], [1.0, 1.0]]),  # two whole micro-batches each
        (8, True, [[1.0] * 4, [1.0] * 4]),  # of two images, of which each rank has one
        (7, True, [[1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 0.0]]),  # the last has one image
    ],
)
def test_shares_of_micro_batches(images, spread, shares):
    batches = MicroBatches(total_batch=8, images=2, spread=spread)
    for rank in range(2):
        sampler = TrainSampler(
            images, batches, rank, 2, seed=0, start_step=0, end_step=1, sizes=[(32, 32)]
        )
        assert sampler.shares(0) == shares[rank]
        assert len(sampler.micro_batches(0)) == len(shares[rank])
