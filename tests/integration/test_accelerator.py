"""The accelerator's branch on two cards of the test accelerator: bit for bit what CPUs compute."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import paddle
import pytest
from paddle import nn

from ppdist.common.errors import ConfigError
from ppdist.config.distributed import DistributedConfig
from ppdist.config.optimizer import OptimizerConfig
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import comm, device
from ppdist.distributed.sync_batch_norm import synchronize_batch_norm
from ppdist.engine.policies.average import AveragedWeights
from ppdist.engine.policies.replicas import check_replica_consistency
from ppdist.engine.precision import Precision
from ppdist.engine.step_policy import StepResult
from ppdist.engine.train_step import StepSettings, TrainStep
from ppdist.losses.base import Loss, LossOutput
from ppdist.models.base import ImageModel
from ppdist.optim.compression import build_exchange
from ppdist.optim.ema import EMA
from ppdist.optim.lr_scheduler import LearningRates
from ppdist.optim.optimizer import build_optimizer
from ppdist.optim.sharded_updater import ShardedUpdater
from ppdist.optim.updater import Updater
from tests.accelerator import plugin
from tests.distributed import run_on_ranks
from tests.once import for_all_workers
from tests.unit.engine.runs import assert_same_checkpoint, records, run_to_end
from tests.unit.engine.tiny import FASTEST, blank_batch, ema_of, fixed_batch, take_step

# How the ranks make one step of their gradients: each takes two micro-batches, of which the last
# rank's second is blank in the third step.
BRANCHES: dict[str, dict] = {
    "plain": {},
    "norms of all ranks": {},
    "bfloat16 sums": {"gradient_dtype": "bfloat16"},
    "factors": {"gradient_rank": 1},
    "largest entries": {"topk_fraction": 0.05},
    "local steps": {"local_sgd_steps": 2},
    "AdamW in shares": {"shard_optimizer": True},
}
STEPS = 3
STEPS_OF_RUNS = 1  # after the first of each run
RUN = (
    "train.epochs=1", "train.batch_size_per_card=2", "checkpoint.every_steps=1",
    "log.every_steps=1",
)  # fmt: skip


class TwoLayers(ImageModel):
    """Two convolutions with batch norm, and the mean: an operator takes long on this device."""

    def __init__(self) -> None:
        super().__init__(3, 1, (0.0, 0.0, 0.0), (255.0, 255.0, 255.0))
        self.first, self.second = nn.Conv2D(3, 8, 3, stride=4), nn.Conv2D(8, 4, 3)
        self.norms = nn.LayerList([nn.BatchNorm2D(8), nn.BatchNorm2D(4)])

    def forward(self, images_B3HW):
        inner = nn.functional.silu(self.norms[0](self.first(images_B3HW)))
        return self.norms[1](self.second(inner)).square().mean([2, 3]) * 0.5 + inner.mean()


class Sum(Loss):
    def forward(self, outputs, boxes_BM4, labels_BM, mask_BM, step, global_normalizers=None):
        weight = 1.0 + mask_BM.sum(1, keepdim=True)
        return LossOutput((outputs * weight).sum(), weight.sum().detach(), {})


@pytest.fixture(scope="module")
def accelerator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return for_all_workers(tmp_path_factory, "accelerator", plugin.build)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five training and two validation images, and what both kinds of ranks leave."""
    folder = tmp_path_factory.mktemp("cards")
    make_shapes(folder / "shapes", train=5, val=2, size=64, seed=0)
    return folder


@pytest.fixture(scope="module")
def on_cards(accelerator: Path) -> list[dict]:
    return _run("branches", plugin.KIND, accelerator)


@pytest.fixture(scope="module")
def on_cpus() -> list[dict]:
    return _run("branches", "cpu")


@pytest.fixture(scope="module")
def copies_of_runs(accelerator: Path, folder: Path) -> list[list[dict[str, int]]]:
    """Of each card; both kinds have run to the end in the folder then."""
    _run("train_to_the_end", "cpu", folder=folder)
    return _run("train_to_the_end", plugin.KIND, accelerator, folder)


def _run(work: str, kind: str, device: Path | None = None, folder: Path | None = None) -> list[Any]:
    argument = {"kind": kind, "folder": f"{folder}"}
    return run_on_ranks(2, f"{__name__}:{work}", argument, hosts=1, seconds=300, plugin=device)


def branches(argument: dict) -> dict:
    """On one rank, each branch for three steps; and what a card is asked besides."""
    kind = argument["kind"]
    comm.init(kind, DistributedConfig())
    found: dict[str, Any] = {"branches": {name: _train(name) for name in BRANCHES}}
    found["replicas"] = _checked_replicas()
    if kind == plugin.KIND:
        found |= {"counts": _counted(), "refused": _refused()}
    return found


def _train(branch: str) -> dict[str, int]:
    """A checksum of each tensor after three steps."""
    train_step = _train_step(branch)
    for step in range(STEPS):
        _take(train_step, step)
    arrays = {f"model/{key}": each.numpy() for key, each in train_step.model.state_dict().items()}
    arrays |= {f"average/{key}": each.numpy() for key, each in ema_of(train_step).average.items()}
    arrays |= train_step.optimizer.state()
    return {key: zlib.crc32(np.ascontiguousarray(each)) for key, each in arrays.items()}


def _train_step(branch: str) -> TrainStep:
    paddle.seed(0)
    model, config = TwoLayers(), DistributedConfig(**BRANCHES[branch])
    together = branch == "norms of all ranks"
    if together:
        synchronize_batch_norm(model)
    name = "adamw" if config.shard_optimizer else "momentum"
    optimizer = build_optimizer(model, OptimizerConfig(name=name), 0.1, False)
    trained = {key: each for key, each in model.named_parameters() if not each.stop_gradient}
    updater = Updater(optimizer, model)
    if config.shard_optimizer:
        updater = ShardedUpdater(optimizer, model, trained)
    return TrainStep(
        model, Sum(), updater, build_exchange(config, trained, optimizer, STEPS),
        Precision(), [AveragedWeights(EMA(model, lambda step: 0.5, {}), updater)],
        StepSettings(seed=0, clip_norm=1.0, loss_divisor=4.0, spread=together),
    )  # fmt: skip


def _take(train_step: TrainStep, step: int) -> None:
    start = 4 * comm.rank()
    halves = [fixed_batch(step, start + at, start + at + 2) for at in (0, 2)]
    batches = halves
    if step == 2 and comm.rank():  # one micro-batch less, or none of the images of one
        batches = [halves[0], blank_batch()] if train_step.statistics.spread else halves[:1]
    rates = LearningRates(0.1, 0.1, 0.9)
    assert take_step(train_step, batches, step, rates).applied


def _checked_replicas() -> list:
    """Of equal replicas, then with a bit flipped in one, then of what that was repaired to."""
    train_step = _train_step("plain")
    found = [check_replica_consistency(train_step)]
    if comm.rank() == 1:
        weight = train_step.model.first.weight
        bits = weight.numpy().view("int32")
        bits[0, 0, 0, 0] ^= 1
        weight.set_value(bits.view("float32"))
    found.append(check_replica_consistency(train_step))
    return [*found, check_replica_consistency(train_step)]


def _counted() -> dict:
    """What a step of the plain branch has asked of this card."""
    train_step = _train_step("plain")
    before = plugin.count("all_reduce")
    _take(train_step, 0)
    return {
        "kind": device.kind(),
        "place": str(next(iter(train_step.model.parameters())).place),
        "cards": device.card_count(),
        "peak": device.peak_allocated_bytes(),
        "reserved": device.peak_reserved_bytes(),
        "communicators": plugin.count("communicators"),
        "sums": plugin.count("all_reduce") - before,
    }


def _refused() -> list[tuple[str, str]]:
    """Code and text of what a card without code, and a kind that is not there, are answered."""
    with plugin.without_code(), pytest.raises(ConfigError) as zeros:
        device.choose("auto")
    with pytest.raises(ConfigError) as absent:
        device.choose("gpu")
    device.choose("auto")
    return [(error.value.code, str(error.value)) for error in (zeros, absent)]


@contextmanager
def _copies_of_steps() -> Iterator[list[dict[str, int]]]:
    """Of each step but a run's first: arrays that went to the card while the host waited, or not.

    What an operator copies because it falls back to the CPU counts in neither.
    """
    steps: list[dict[str, int]] = []
    warm: list[TrainStep] = []
    waited = 0
    usual_to_tensor, usual_step = paddle.to_tensor, TrainStep.__call__

    def to_tensor(*args: Any, **kwargs: Any) -> paddle.Tensor:
        nonlocal waited
        tensor = usual_to_tensor(*args, **kwargs)
        waited += not tensor.place.is_cpu_place()
        return tensor

    def step(self: TrainStep, *args: Any, **kwargs: Any) -> StepResult:
        before = waited, plugin.count("later to the device")
        result = usual_step(self, *args, **kwargs)
        later = plugin.count("later to the device") - before[1]
        if self in warm:  # the first step of a run also makes what all of them use
            steps.append({"waited": waited - before[0], "later": later})
        warm.append(self)
        return result

    with patch.object(paddle, "to_tensor", to_tensor), patch.object(TrainStep, "__call__", step):
        yield steps


def train_to_the_end(argument: dict) -> list[dict[str, int]]:
    """`<kind>` evaluates and saves; on cards `<kind> again` goes on from its first step.

    Returns: the copies of the steps on a card.
    """
    kind, folder = argument["kind"], Path(argument["folder"])
    comm.init(kind, DistributedConfig())
    options = {"model": FASTEST, "evaluate": True, "device": kind}
    if kind != plugin.KIND:
        run_to_end(folder / "shapes", folder / kind, *RUN, **options)
        return []
    with _copies_of_steps() as copies:
        run_to_end(folder / "shapes", folder / kind, *RUN, **options)
        first = folder / kind / "checkpoints" / "step-00000001"
        run_to_end(folder / "shapes", folder / f"{kind} again", *RUN, resume=first, **options)
    return copies


@pytest.mark.parametrize("branch", BRANCHES)
def test_cards_compute_bit_for_bit_what_cpus_do(branch, on_cards, on_cpus):
    for card, cpu in zip(on_cards, on_cpus):
        found, expected = card["branches"][branch], cpu["branches"][branch]
        assert found.keys() == expected.keys()
        assert [key for key in expected if found[key] != expected[key]] == []
        assert expected != on_cpus[0]["branches"]["plain"] or branch == "plain"


def test_a_rank_trains_on_its_card_through_fleet(on_cards):
    for rank, counts in enumerate(card["counts"] for card in on_cards):
        assert counts["kind"] == plugin.KIND and counts["cards"] == 2
        assert counts["place"] == f"Place({plugin.KIND}:{rank})"
        assert counts["reserved"] >= counts["peak"] > 1 << 16
        assert counts["communicators"] == 1
        assert counts["sums"] >= 2  # the reducer's during backward, and the tally


def test_a_flipped_bit_on_one_card_is_found(on_cards, on_cpus):
    for card, cpu in zip(on_cards, on_cpus):
        assert card["replicas"] == cpu["replicas"]
        equal, (text, sure), repaired = card["replicas"]
        assert equal == repaired == ["", True]
        assert "first first.weight" in text and not sure  # of two nobody can tell


@pytest.mark.slow
def test_the_host_waits_for_no_copy_to_a_card(copies_of_runs):
    """A micro-batch of seven arrays, and what the rank tells the others."""
    for copies in copies_of_runs:
        assert copies == [{"waited": 0, "later": 7 + 1}] * STEPS_OF_RUNS


def test_a_card_that_gives_zeros_trains_nothing(on_cards):
    for rank, ((code, text), (absent_code, absent)) in enumerate(
        card["refused"] for card in on_cards
    ):
        assert code == "card_without_code"
        assert f"{plugin.KIND}:{rank}" in text and "cu129" in text
        assert absent_code == "device_unavailable"
        assert f"knows only cpu, {plugin.KIND}" in absent


@pytest.mark.slow
@pytest.mark.usefixtures("copies_of_runs")
def test_evaluation_checkpoint_resume_equal_those_of_cpus(folder):
    kind = plugin.KIND
    for step in ("step-00000001", "last"):
        assert_same_checkpoint(folder / kind, folder / "cpu", link=step)
    assert_same_checkpoint(folder / kind, folder / f"{kind} again")
    scores = [
        [line["mAP"] for line in records(folder / each) if "mAP" in line]
        for each in (kind, "cpu", f"{kind} again")
    ]
    assert len(scores[0]) == 1 and scores[0] == scores[1] == scores[2]
