"""The order of training and evaluation: exactly once, whoever shares the work."""

import pytest

from ppdist.data.sample import EMPTY
from ppdist.data.sampler import EvalSampler, TrainSampler, epoch_order

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
        batch_size_per_card=batch,
        accumulate=accumulate,
        rank=rank,
        world=world,
        seed=seed,
        start_step=start,
        end_step=end,
        sizes=sizes,
    )


def ranks(images, world, accumulate, batch) -> list[TrainSampler]:
    return [sampler(images, world, accumulate, batch, rank) for rank in range(world)]


def indices_of_step(samplers, step) -> list[int]:
    """Of all ranks and micro-batches, padding left out."""
    keys = [key for one in samplers for micro in one.micro_batches(step) for key in micro]
    return sorted(key.index for key in keys if key.index >= 0)


@pytest.mark.parametrize(("images", "world", "accumulate", "batch"), SHAPES)
def test_every_image_comes_exactly_once_in_every_epoch(images, world, accumulate, batch):
    samplers = ranks(images, world, accumulate, batch)
    steps = samplers[0].steps_per_epoch
    assert steps == -(-images // (world * accumulate * batch))
    for epoch in range(3):
        seen = []
        for step in range(epoch * steps, (epoch + 1) * steps):
            seen += indices_of_step(samplers, step)
        assert sorted(seen) == list(range(images))


@pytest.mark.parametrize(("images", "world", "accumulate", "batch"), SHAPES)
def test_a_step_holds_the_same_images_however_its_batch_is_made_up(
    images, world, accumulate, batch
):
    total = world * accumulate * batch
    together = [sampler(images, batch=total)]
    accumulated = [sampler(images, accumulate=world * accumulate, batch=batch)]
    shared = ranks(images, world, accumulate, batch)
    for step in range(2 * together[0].steps_per_epoch + 1):
        expected = indices_of_step(together, step)
        assert indices_of_step(accumulated, step) == expected
        assert indices_of_step(shared, step) == expected


@pytest.mark.parametrize(("images", "world", "accumulate", "batch"), SHAPES)
def test_all_ranks_have_as_many_micro_batches_and_none_is_empty(images, world, accumulate, batch):
    samplers = ranks(images, world, accumulate, batch)
    for step in range(samplers[0].steps_per_epoch):
        sizes = []
        for one in samplers:
            micro_batches = one.micro_batches(step)
            assert len(micro_batches) == accumulate
            for keys in micro_batches:
                real = sum(key.index >= 0 for key in keys)
                assert len(keys) == max(1, real) and len(keys) <= batch
                sizes.append(real)
        assert max(sizes) - min(sizes) <= 1, "the last step must be dealt out evenly"


def test_the_length_is_the_number_of_micro_batches():
    one = sampler(50, world=2, accumulate=3, batch=2, start=4, end=11)
    assert len(list(one)) == len(one) == 21


def test_a_resumed_sampler_goes_on_where_the_first_would_have():
    whole = list(sampler(23, world=2, accumulate=2, batch=2, rank=1, end=12))
    resumed = list(sampler(23, world=2, accumulate=2, batch=2, rank=1, start=5, end=12))
    assert resumed == whole[5 * 2 :]


def test_epochs_are_different_permutations_and_seeds_too():
    orders = [epoch_order(50, 0, 0), epoch_order(50, 0, 1), epoch_order(50, 1, 0)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_the_order_is_the_one_of_this_release():
    # A change of it would break the order of every run that is resumed.
    assert epoch_order(8, 7, 2).tolist() == [5, 2, 4, 3, 6, 0, 1, 7]


def test_one_size_a_step_for_all_ranks_and_every_size_in_use():
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


def test_a_micro_batch_that_is_empty_on_every_rank_says_so():
    def indices(images):
        step = [one.micro_batches(0) for one in ranks(images, world=2, accumulate=2, batch=4)]
        return [[min(micro[0].index, 0) for micro in of_rank] for of_rank in step]

    assert indices(3) == [[0, 0], [0, -1]]  # 3 images for 2 ranks x 2 micro-batches
    assert indices(2) == [[0, EMPTY], [0, EMPTY]]
    assert indices(1) == [[0, EMPTY], [-1, EMPTY]]
