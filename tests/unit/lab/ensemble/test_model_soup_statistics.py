"""Running statistics made anew: against numpy, and the same on two ranks bit for bit."""

import hashlib
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.config.distributed import DistributedConfig
from ppdist.data.datasets.build import read_split
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import comm
from ppdist.distributed.paddle_api import momentum, running_statistics
from ppdist.engine.build import build_model
from ppdist.lab.ensemble.model_soup import LastEpoch, renew_statistics
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.unit.engine.tiny import norms_of, tiny_config

IMAGES, BATCH = 7, 2  # the last micro-batch has one image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("statistics")
    make_shapes(root, train=IMAGES, val=1, size=64, seed=0)
    return root


def prepared(folder: Path, images: int = 100, overrides: tuple[str, ...] = ()):
    """A fresh model, with other statistics than it had, and the last epoch of its training."""
    batch = f"train.batch_size_per_card={BATCH}"
    written = ["train.epochs=3", "data.augment.plain_epochs=1", batch]
    config = tiny_config(folder, [*written, *overrides])
    model = build_model(config)
    for layer in norms_of(model):
        mean, _ = running_statistics(layer)
        mean.set_value(mean + 3.0)
    train_set = read_split(config.data, "train", 3)
    return model, LastEpoch(config, train_set, images)


def statistics(model) -> list[np.ndarray]:
    return [t.numpy().copy() for layer in norms_of(model) for t in running_statistics(layer)]


def digest(folder):
    comm.init("cpu", DistributedConfig())
    model, epoch = prepared(Path(folder))
    renew_statistics(model, epoch)
    content = b"".join(array.tobytes() for array in statistics(model))
    return hashlib.sha256(content).hexdigest()


def test_statistics_are_means_over_images(folder: Path) -> None:
    model, epoch = prepared(folder)
    seen: dict[int, list] = {}

    def note(layer, inputs):
        x_BCHW = inputs[0].numpy().astype(np.float64)
        found = len(x_BCHW), x_BCHW.mean((0, 2, 3)), x_BCHW.var((0, 2, 3))
        seen.setdefault(id(layer), []).append(found)

    hooks = [layer.register_forward_pre_hook(note) for layer in norms_of(model)]
    renew_statistics(model, epoch)
    for hook in hooks:
        hook.remove()
    assert epoch.count == 4 and epoch.images == IMAGES
    for layer in norms_of(model):
        batches = seen[id(layer)]
        assert [count for count, *_ in batches] == [2, 2, 2, 1]
        mean = sum(count * mean for count, mean, _ in batches) / IMAGES
        variance = sum(count * variance for count, _, variance in batches) / IMAGES
        for got, want in zip(running_statistics(layer), (mean, variance)):
            np.testing.assert_allclose(got.numpy(), want, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_two_ranks_make_those_of_one_rank_bit_for_bit(folder: Path) -> None:
    alone = digest(str(folder))
    function = "tests.unit.lab.ensemble.test_model_soup_statistics:digest"
    assert run_on_ranks(2, function, str(folder)) == [alone] * 2


def test_the_model_trains_on_as_before(folder: Path) -> None:
    model, epoch = prepared(folder, images=3)
    weights = {key: value.numpy().copy() for key, value in model.named_parameters()
               if not value.stop_gradient}  # fmt: skip
    momenta = [momentum(layer) for layer in norms_of(model)]
    renew_statistics(model, epoch)
    assert (epoch.count, epoch.images) == (2, 4), "whole micro-batches"
    assert not any(layer.training for layer in model.sublayers(include_self=True))
    assert [momentum(layer) for layer in norms_of(model)] == momenta and 0.0 not in momenta
    named = dict(model.named_parameters())
    assert all((named[key].numpy() == value).all() for key, value in weights.items())


def test_shared_statistics_are_kept(folder: Path) -> None:
    model, epoch = prepared(folder, images=2)
    keys = [key for key in model.state_dict() if key.endswith(("._mean", "._variance"))]
    frozen = frozenset(key for key in model.state_dict() if key.startswith("backbone."))
    before = {key: model.state_dict()[key].numpy().copy() for key in keys}
    renew_statistics(model, epoch, frozen)
    after = {key: model.state_dict()[key].numpy() for key in keys}
    changed = {key for key in keys if (before[key] != after[key]).any()}
    assert changed and not changed & frozen
    assert {key.split(".")[0] for key in changed} == {"neck", "yolo_head"}
    renew_statistics(model, epoch, frozenset(model.state_dict()))  # nothing to do
    assert all((after[key] == model.state_dict()[key].numpy()).all() for key in keys)
    renew_statistics(model, epoch, frozenset(keys))  # behind weights that differ
    assert any((after[key] != model.state_dict()[key].numpy()).any() for key in frozen & {*keys})


def test_images_are_those_of_the_last_epoch(folder: Path) -> None:
    _, epoch = prepared(folder)
    keys = [key for keys in epoch.plan() for key in keys]
    assert {key.epoch for key in keys} == {2}
    assert sorted(key.index for key in keys) == list(range(IMAGES))
    first, second = ([batch.images_B3HW.numpy() for batch in epoch.batches()] for _ in range(2))
    assert all((a == b).all() for a, b in zip(first, second)), "as often as wanted"
    assert paddle.is_tensor(next(iter(epoch.batches())).boxes_BM4)


def test_the_last_epoch_is_of_the_longer_run(folder: Path) -> None:
    lengthened = (
        "train.total_batch=6",
        "train.epochs_compensation=auto",
        "optimizer.reference_batch_size=2",
        "optimizer.noise_scale=6",
    )
    _, epoch = prepared(folder, overrides=lengthened)
    # (1 + 6 / 6) / (1 + 2 / 6) = 1.5 times 3 epochs, up to whole ones.
    assert {key.epoch for keys in epoch.plan() for key in keys} == {4}


def test_the_batch_of_the_training_must_be_known(folder: Path) -> None:
    with raises("auto_outside_training"):
        prepared(folder, overrides=("train.batch_size_per_card=auto",))
