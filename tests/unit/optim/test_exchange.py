"""Compressed gradients: the same on every rank, nothing lost, and counted on the wire."""

import socket
from pathlib import Path

import numpy as np
import paddle
import pytest

from ppdist.common.errors import ConfigError
from ppdist.distributed import comm
from ppdist.distributed.store import sent_bytes
from ppdist.engine.preflight import check_precision
from ppdist.optim.compression import LowPrecision, PowerSGD, TopKSparsify, float16_scale
from ppdist.optim.exchange import Exchange
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.unit.engine.tiny import (
    FASTEST,
    build_step,
    fixed_batch,
    init_cpu,
    take_step,
    tiny_config,
)

SHAPES = ([8, 4, 3, 3], [8], [16, 12], [1, 1])
FACTOR = 0.25
FEEDBACK = ("low rank", "top k")
MODES = {
    "bfloat16": lambda parameters: LowPrecision("bfloat16"),
    "low rank": lambda parameters: PowerSGD(parameters, 2),
    "top k": lambda parameters: TopKSparsify(parameters, 0.05),
}


def parameters(shapes=SHAPES):
    return {f"layer{at}.weight": paddle.zeros(shape) for at, shape in enumerate(shapes)}


def drawn(step, rank, shapes=SHAPES):
    rng = np.random.RandomState(100 * step + rank)
    return [paddle.to_tensor(rng.standard_normal(shape).astype("float32")) for shape in shapes]


def averaged(exchange, step, rank, factor=FACTOR):
    gradients = drawn(step, rank)
    exchange.average(gradients, lambda: factor)
    return [gradient.numpy() for gradient in gradients]


def rest_of(exchange):
    return [rest.numpy().ravel() for rest in exchange.rest]


LARGE = ([512, 128, 3, 3], [64], [256, 1024])
ENTRIES = sum(int(np.prod(shape)) for shape in LARGE)


def bytes_of_modes():
    """Bytes that this rank sends in a step, per mode."""
    found, large = {}, drawn(0, comm.rank(), LARGE)

    def exchange(way):
        way.average([gradient.clone() for gradient in large], lambda: 1.0)

    modes = (
        {"float32": lambda parameters: Exchange()}
        | MODES
        | {
            "low rank": lambda parameters: PowerSGD(parameters, 4),
            "top k": lambda parameters: TopKSparsify(parameters, 0.01),
        }
    )
    for name, build in modes.items():
        way = build(parameters(LARGE))
        exchange(way)  # opens connections
        sent = [sent_bytes()]
        for _ in range(5):
            exchange(way)
            sent.append(sent_bytes())
        found[name] = int(np.diff(sent).min())  # a busy kernel sends some again: more, never less
    return found


def training_steps(folder):
    """Per mode: bytes of a step of the tiny detector, and its weights after some."""
    found = {}
    for mode in ("", "gradient_dtype: bfloat16", "gradient_rank: 2", "topk_fraction: 0.01"):
        overrides = ["train.batch_size_per_card=4", f"distributed={{{mode}}}"]
        train_step, rates = build_step(tiny_config(folder, overrides, FASTEST), False)
        start, sent = 4 * comm.rank(), []
        for step in range(5):
            half = [fixed_batch(step, start, start + 4)]
            assert take_step(train_step, half, step, rates).applied
            sent.append(sent_bytes())
        weights = train_step.model.parameters()
        found[mode or "plain"] = {
            "bytes": int(np.diff(sent).min()),
            "entries": sum(each.size for each in weights),
            "weights": [float(each.sum()) for each in weights],
        }
    return found


def all_modes(folder):
    """On each rank, per mode: gradients of three steps, what was kept; and bytes sent."""
    init_cpu()
    rank = comm.rank()
    results = {"bytes": bytes_of_modes(), "training steps": training_steps(Path(folder))}
    for name, build in MODES.items():
        exchange = build(parameters())
        steps = [averaged(exchange, step, rank) for step in (0, 1)]
        state = exchange.state()
        kept = [] if isinstance(exchange, LowPrecision) else rest_of(exchange)
        steps.append(averaged(exchange, 2, rank))
        results[name] = {
            "steps": [[each.ravel().tolist() for each in step] for step in steps],
            "kept": [each.tolist() for each in kept],
            "state": {key: array.tolist() for key, array in state.items()},
        }
    spoiled = TopKSparsify(parameters(), 0.05)
    averaged(spoiled, 0, rank)
    before = rest_of(spoiled)
    gradients = drawn(1, rank)
    if rank == 1:
        gradients[0][0, 0, 0, 0] = float("inf")
    spoiled.average(gradients, lambda: FACTOR)
    results["one not finite"] = {
        "nan everywhere": all(bool(paddle.isnan(each).all()) for each in gradients),
        "kept as before": all(map(np.array_equal, before, rest_of(spoiled))),
    }
    results["of four ranks"] = {name: of_four_ranks(MODES[name]) for name in FEEDBACK}
    with pytest.raises(ConfigError) as refused:
        check_precision(tiny_config(Path(folder), ["distributed.gradient_dtype=float16"]))
    results["float16 on gloo"] = str(refused.value)
    return results


def of_four_ranks(build):
    """What four ranks had kept, in all, and what these two take of it."""
    exchange = build(parameters())
    averaged(exchange, 0, comm.rank())
    of_two = exchange.state()
    rests = [key for key in of_two if "/rest/" in key]
    of_four = of_two | {key: np.concatenate([of_two[key], 3 * of_two[key]]) for key in rests}
    resumed = build(parameters())
    assert resumed.load(of_four) == ""
    taken = resumed.state()
    return {key: [of_four[key].sum(0).tolist(), taken[key].sum(0).tolist()] for key in rests}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("ranks"))
    return run_on_ranks(2, "tests.unit.optim.test_exchange:all_modes", folder)


def exact(step, world=2):
    gradients = [drawn(step, rank) for rank in range(world)]
    return [np.mean([each[at].numpy() for each in gradients], 0) for at in range(len(SHAPES))]


@pytest.mark.parametrize("mode", MODES)
def test_both_ranks_get_bitwise_equal_gradients(ranks, mode):
    first, second = (rank[mode]["steps"] for rank in ranks)
    assert first == second


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_one_axis_are_averaged_exactly(ranks, mode):
    for step in range(3):
        assert np.array_equal(np.float32(ranks[0][mode]["steps"][step][1]), exact(step)[1])


def test_bfloat16_is_the_mean_to_its_precision(ranks):
    for step in range(3):
        for found, mean in zip(ranks[0]["bfloat16"]["steps"][step], exact(step)):
            largest = max(
                np.abs(each[0].numpy()).max() for each in (drawn(step, 0), drawn(step, 1))
            )
            assert np.abs(np.float32(found) - mean.ravel()).max() < 4 * 2**-8 * largest


@pytest.mark.parametrize("mode", FEEDBACK)
def test_what_is_not_sent_is_kept(ranks, mode):
    compressed = [at for at, shape in enumerate(SHAPES) if len(shape) > 1]
    if mode == "low rank":
        compressed = [0, 2]  # a 1 x 1 matrix has no smaller factors
    for at, index in enumerate(compressed):
        sent = sum(np.float64(ranks[0][mode]["steps"][step][index]) for step in (0, 1))
        kept = sum(np.float64(rank[mode]["kept"][at]) for rank in ranks) / FACTOR
        assert sent + kept == pytest.approx(
            sum(exact(step)[index].ravel() for step in (0, 1)), abs=1e-5
        )
        assert at > 0 or np.abs(kept).max() > 0.1


@pytest.mark.parametrize("mode", FEEDBACK)
def test_resume_on_two_of_four_ranks_keeps_residuals(ranks, mode):
    for rank in ranks:
        pairs = rank["of four ranks"][mode].values()
        for kept, taken in pairs:
            assert np.array(taken) == pytest.approx(np.array(kept), abs=1e-6)
        assert max(np.abs(kept).max() for kept, _ in pairs) > 0.1


def test_unusable_checkpoint_residuals_reported():
    state = TopKSparsify(parameters(), 0.05).state()
    assert Exchange().load({}) == TopKSparsify(parameters(), 0.05).load(state) == ""
    warning = Exchange().load(state)
    assert "topk/rest/layer0.weight and 2 more" in warning
    assert PowerSGD(parameters(), 2).load(state) == warning


def test_other_powersgd_rank_reuses_shared_state():
    of_one, of_five = PowerSGD(parameters(), 1), PowerSGD(parameters(), 5)
    assert (of_one.keys, of_five.keys) == (["layer0.weight", "layer2.weight"],) * 2
    of_seven = PowerSGD(parameters(), 7)  # 7 * (16 + 12) entries are more than 16 * 12
    assert of_seven.keys == []
    averaged(of_one, 0, 0)
    assert "low_rank/rest/layer0.weight and 1 more" in of_seven.load(of_one.state())
    assert of_five.load(of_one.state()) == ""
    assert all(map(np.array_equal, rest_of(of_five), rest_of(of_one)))
    assert of_one.load(of_seven.state()) == ""


def test_non_finite_gradient_enters_no_residual(ranks):
    good = {"nan everywhere": True, "kept as before": True}
    assert [rank["one not finite"] for rank in ranks] == [good, good]


def test_float16_is_refused_on_gloo(ranks):
    assert "distributed.gradient_dtype" in ranks[0]["float16 on gloo"]


def test_powersgd_of_two_ranks_equals_one_with_mean(ranks):
    one = PowerSGD(parameters(), 2)
    for step in range(3):
        gradients = [paddle.to_tensor(each) for each in exact(step)]
        one.average(gradients, lambda: FACTOR)
        for found, alone in zip(ranks[0]["low rank"]["steps"][step], gradients):
            assert np.float32(found) == pytest.approx(alone.numpy().ravel(), abs=1e-4)


def test_a_gradient_of_rank_one_passes_whole():
    exchange = PowerSGD(parameters([[16, 12]]), 1)
    matrix = paddle.outer(paddle.arange(16, dtype="float32"), paddle.arange(12, dtype="float32"))
    gradients = [matrix.clone()]
    exchange.average(gradients, lambda: 1.0)
    assert gradients[0].numpy() == pytest.approx(matrix.numpy(), abs=1e-3)
    assert np.abs(exchange.rest[0].numpy()).max() < 1e-3


def test_top_k_sends_the_largest():
    exchange = TopKSparsify(parameters([[2, 5]]), 0.3)
    gradients = [paddle.to_tensor([[1.0, -9.0, 2.0, 3.0, 0.0], [4.0, 8.0, -2.0, 1.0, -7.0]])]
    exchange.average(gradients, lambda: 0.5)
    assert gradients[0].tolist() == [[0, -9, 0, 0, 0], [0, 8, 0, 0, -7]]
    assert exchange.rest[0].tolist() == [[0.5, 0, 1, 1.5, 0], [2, 0, -1, 0.5, 0]]


@pytest.mark.parametrize("size", [1e-15, 1e-6, 1.0, 1e6, 1e15])
def test_float16_loses_no_gradient_to_its_range(size):
    gradients = [each * size for each in drawn(0, 0)]
    before = [each.numpy() for each in gradients]
    LowPrecision("float16").average(gradients, lambda: 1.0)
    for found, given in zip(gradients, before):
        assert found.numpy() == pytest.approx(given, abs=1e-3 * float(np.abs(given).max()))


def test_float16_scale_worked_out_by_hand(monkeypatch):
    assert float16_scale(16.0) == 8192.0  # one rank, |g| <= 4: 4 * 8192 = 32768
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "4")
    assert float16_scale(16.0) == 4096.0  # four ranks with |g| of 2 each: a sum of 8 at most
    assert float16_scale(0.0) == 1.0
    assert float16_scale(float("inf")) == 1.0


def test_what_was_kept_for_another_model_is_refused():
    state = TopKSparsify(parameters(), 0.05).state()
    other = TopKSparsify(parameters([[3, 3]]), 0.05)
    with raises("checkpoint_of_other_config", "layer0.weight", "[8, 36]", "[3, 3]"):
        other.load(state)
    other.load({})


@pytest.mark.parametrize(
    "ways", [{"gradient_dtype": "bfloat16", "topk_fraction": 0.01},
             {"gradient_rank": 4, "local_sgd_steps": 8}],
)  # fmt: skip
def test_two_ways_to_send_less_are_refused(ways, tmp_path):
    items = [f"distributed.{key}={value}" for key, value in ways.items()]
    with raises("bad_value", *(f"distributed.{key}: {value}" for key, value in ways.items())):
        tiny_config(tmp_path, items)


def test_bytes_on_the_wire_are_what_the_formulas_say(ranks):
    for sent in (rank["bytes"] for rank in ranks):
        # Ring all-reduce: 2 (W - 1) / W times the size, here once; messages have headers.
        assert sent["float32"] == pytest.approx(4 * ENTRIES, rel=0.01)
        assert sent["bfloat16"] == pytest.approx(2 * ENTRIES, rel=0.01)
        factors = 4 * ((512 + 1152) + (256 + 1024))
        assert sent["low rank"] == pytest.approx(4 * (factors + 64), abs=2000)
        assert sent["top k"] == pytest.approx(8 * 0.01 * ENTRIES, abs=2000)


def test_training_step_sends_what_config_says(ranks):
    for steps in (rank["training steps"] for rank in ranks):
        size = steps["plain"]["entries"]
        assert steps["plain"]["bytes"] == pytest.approx(4 * size, rel=0.1)  # and tally, statistics
        saved = {name: steps["plain"]["bytes"] - step["bytes"] for name, step in steps.items()}
        assert saved["gradient_dtype: bfloat16"] == pytest.approx(2 * size, rel=0.1)
        assert saved["gradient_rank: 2"] > 2.5 * size
        assert saved["topk_fraction: 0.01"] > 3 * size


def test_bytes_sent_are_those_that_went_through_sockets(tmp_path):
    server = socket.create_server(("127.0.0.1", 0))
    sender = socket.create_connection(server.getsockname())
    receiver, _ = server.accept()
    with server, sender, receiver:
        before = sent_bytes()
        for _ in range(4):
            sender.sendall(b"x" * 50_000)
            left = 50_000
            while left:
                left -= len(receiver.recv(left))
        (tmp_path / "file").write_bytes(b"x" * 100_000)  # a file is not the wire
        assert sent_bytes() - before == 200_000
