"""Where Paddle lacks something private, the public way gives the same."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from ppdist.common.errors import ExportError, UserError
from ppdist.distributed import paddle_api


class Without:
    """An object that lacks some attributes; the rest, also what is set, is that of another one."""

    def __init__(self, whole: Any, *names: str) -> None:
        vars(self).update(_whole=whole, _names=names)

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            raise AttributeError(name)
        return getattr(self._whole, name)

    def __repr__(self) -> str:
        return repr(self._whole)


class OtherNorm(nn.BatchNorm2D):
    """Batch norm of a Paddle with other private names."""

    GONE = ("_mean", "_variance", "_use_global_stats", "_epsilon", "_momentum")
    inside = False  # its own forward still finds them

    def __getattribute__(self, name: str) -> Any:
        gone = name in OtherNorm.GONE and not OtherNorm.inside
        return super().__getattribute__("no such name" if gone else name)

    def __getattr__(self, name: str) -> Any:
        if name in OtherNorm.GONE and not OtherNorm.inside:
            raise AttributeError(name)
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        OtherNorm.inside = True
        try:
            return super().extra_repr()
        finally:
            OtherNorm.inside = False


@pytest.fixture
def norms() -> tuple[nn.BatchNorm2D, nn.BatchNorm2D]:
    """The same batch norm, as it is and with other private names."""
    known = nn.BatchNorm2D(3, momentum=0.97, epsilon=1e-3)
    for tensor in known.state_dict().values():
        tensor.set_value(paddle.rand([3]) + 0.5)
    other = OtherNorm.__new__(OtherNorm)
    vars(other).update(vars(known))
    return known, other


def test_statistics_are_found_in_the_state_dict(norms: tuple) -> None:
    known, other = norms
    found = paddle_api.running_statistics(other)
    assert all(a is b for a, b in zip(found, paddle_api.running_statistics(known), strict=True))
    found[0].set_value(paddle.full([3], 7.0))
    assert known._mean.tolist() == [7.0, 7.0, 7.0]


def test_a_norm_tells_how_it_was_made(norms: tuple) -> None:
    for norm in norms:
        assert paddle_api.epsilon(norm) == 1e-3
        assert paddle_api.momentum(norm) == 0.97


def test_a_frozen_norm_computes_alike(norms: tuple) -> None:
    x = paddle.randn([2, 3, 5, 5])
    outputs = []
    for norm in norms:
        norm.train()
        assert not paddle_api.normalises_by_running(norm)
        paddle_api.normalise_by_running(norm)
        assert paddle_api.normalises_by_running(norm)
        before = [tensor.numpy().copy() for tensor in paddle_api.running_statistics(norm)]
        outputs.append(norm(x).numpy())
        after = [tensor.numpy() for tensor in paddle_api.running_statistics(norm)]
        assert all((a == b).all() for a, b in zip(before, after))
    np.testing.assert_allclose(*outputs, rtol=1e-6)


def test_momentum_that_cannot_be_set_is_an_error(norms: tuple) -> None:
    known, other = norms
    paddle_api.set_momentum(known, 0.5)
    assert known._momentum == 0.5
    with pytest.raises(UserError) as raised:
        paddle_api.set_momentum(other, 0.0)
    assert raised.value.code == "paddle_api_missing"
    assert str(raised.value) == (
        f"the installed Paddle {paddle.__version__} has no OtherNorm._momentum any more, and "
        "ppdist knows no other way to what it does; install a version that ppdist was run with: "
        "README, Versions of Paddle"
    )


def test_a_convolution_of_unknown_settings_is_none() -> None:
    conv = nn.Conv2D(4, 6, 3, stride=2, padding=1, groups=2)
    made = paddle_api.conv_settings(conv)
    assert made is not None and (made.groups, made.data_format) == (2, "NCHW")
    assert paddle_api.conv_settings(Without(conv, "_padding_mode")) is None


@pytest.mark.parametrize("keep", [5, 300])
@pytest.mark.parametrize("score_threshold", [0.0, 0.4, 1.0])
def test_suppression_without_the_operator_keeps_the_same(
    monkeypatch: pytest.MonkeyPatch, keep: int, score_threshold: float
) -> None:
    rng = np.random.default_rng(0)
    low_BN2 = rng.uniform(0, 80, (2, 100, 2))
    boxes_BN4 = np.concatenate([low_BN2, low_BN2 + rng.uniform(10, 50, (2, 100, 2))], axis=2)
    tensors = (
        paddle.to_tensor(boxes_BN4.astype("float32")),
        paddle.to_tensor(rng.uniform(0, 1, (2, 3, 100)).astype("float32")),
    )
    limits = {
        "score_threshold": score_threshold, "candidates": 40, "keep": keep, "iou_threshold": 0.4,
    }  # fmt: skip
    rows_R6, count_B = paddle_api.multiclass_nms3(*tensors, **limits)
    monkeypatch.setattr(paddle, "_C_ops", SimpleNamespace())
    other_R6, other_B = paddle_api.multiclass_nms3(*tensors, **limits)
    assert other_B.tolist() == count_B.tolist() and other_B.dtype == count_B.dtype
    assert np.array_equal(other_R6.numpy(), rows_R6.numpy())


def test_no_graph_without_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle, "_C_ops", SimpleNamespace())
    monkeypatch.setattr(paddle, "in_dynamic_mode", lambda: False)
    with pytest.raises(ExportError) as raised:
        paddle_api.multiclass_nms3(
            paddle.zeros([1, 1, 4]), paddle.zeros([1, 1, 1]), score_threshold=0.0, candidates=1,
            keep=1, iou_threshold=0.5,
        )  # fmt: skip
    assert raised.value.code == "nms_operator_missing"


@pytest.mark.parametrize("kind", [paddle.optimizer.Momentum, paddle.optimizer.AdamW])
def test_state_is_found_in_the_state_dict(kind: type) -> None:
    model = nn.Linear(3, 2)
    optimizer = kind(parameters=model.parameters())
    other = Without(optimizer, "_accumulators", "_master_weights", "_accumulators_holder")
    assert paddle_api.accumulators(other) == {}  # before the first step
    model(paddle.ones([2, 3])).sum().backward()
    optimizer.step()
    found, known = paddle_api.accumulators(other), paddle_api.accumulators(optimizer)
    assert set(found) == set(known)
    for of, tensors in known.items():
        assert {name: id(each) for name, each in found[of].items()} == {
            name: id(each) for name, each in tensors.items()
        }
    assert paddle_api.master_weights(other) == paddle_api.master_weights(optimizer) == {}


def test_masters_are_found_in_the_state_dict() -> None:
    master = paddle.ones([2])
    optimizer = SimpleNamespace(state_dict=lambda: {"master_weights": {"w": master}})
    assert paddle_api.master_weights(optimizer)["w"] is master


def test_the_second_copy_of_loaded_state_goes() -> None:
    model = nn.Linear(3, 2)
    optimizer = paddle.optimizer.Momentum(parameters=model.parameters())
    model(paddle.ones([2, 3])).sum().backward()
    optimizer.step()
    optimizer._accumulators_holder = {"kept": 1}
    paddle_api.forget_loaded_state(optimizer)
    assert optimizer._accumulators_holder == {}
    paddle_api.forget_loaded_state(Without(optimizer, "_accumulators_holder"))


def test_betas_and_momentum_have_no_other_way() -> None:
    parameters = nn.Linear(3, 2).parameters()
    adamw = paddle.optimizer.AdamW(beta1=0.8, parameters=parameters)
    assert paddle_api.first_power(adamw, "beta1_pow_acc") == pytest.approx(0.8)
    assert paddle_api.first_power(adamw, "moment1") == 0.0
    sgd = paddle.optimizer.Momentum(parameters=[{"params": parameters}])
    paddle_api.set_optimizer_momentum(sgd, 0.25)
    assert sgd._param_groups[0]["momentum"] == 0.25
    for call in (
        lambda: paddle_api.first_power(Without(adamw, "_beta2"), "beta2_pow_acc"),
        lambda: paddle_api.set_optimizer_momentum(Without(sgd, "_param_groups"), 0.5),
    ):
        with pytest.raises(UserError) as raised:
            call()
        assert raised.value.code == "paddle_api_missing"


def test_a_store_has_no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle_api, "core", None)
    for call in (paddle_api.global_store, lambda: paddle_api.make_store("127.0.0.1", 1, False)):
        with pytest.raises(UserError) as raised:
            call()
        assert raised.value.code == "paddle_api_missing"


def test_groups_are_made_at_the_store_given(monkeypatch: pytest.MonkeyPatch) -> None:
    collective = paddle_api.pd.collective
    monkeypatch.setattr(collective, "_default_store", "usual")
    assert paddle_api.group_store() == "usual"
    with paddle_api.groups_at("apart"):
        assert collective._default_store == "apart"
    assert collective._default_store == "usual"
    monkeypatch.delattr(collective, "_default_store")
    monkeypatch.setattr(paddle_api, "global_store", lambda: "of all")
    assert paddle_api.group_store() == "of all"
    with paddle_api.groups_at("apart"):
        assert not hasattr(collective, "_default_store")


def test_the_group_of_all_ranks_is_group_0(monkeypatch: pytest.MonkeyPatch) -> None:
    pd = paddle_api.pd
    monkeypatch.setattr(pd, "get_group", lambda number: ("group", number))
    monkeypatch.setattr(pd.collective, "_get_default_group", lambda: "default")
    assert paddle_api.default_group() == "default"
    monkeypatch.delattr(pd.collective, "_get_default_group")
    assert paddle_api.default_group() == ("group", 0)


def test_fleet_is_quiet_where_it_has_a_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("of fleet")
    strategy = SimpleNamespace(logger=logger)
    base = SimpleNamespace(distributed_strategy=strategy)
    monkeypatch.setattr(paddle_api.pd.fleet, "base", base)
    paddle_api.quiet_fleet()
    assert logger.level == logging.WARNING
    monkeypatch.setattr(paddle_api.pd.fleet, "base", SimpleNamespace())
    paddle_api.quiet_fleet()


def test_the_bucket_is_that_of_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = SimpleNamespace(fuse_grad_size_in_MB=32)
    monkeypatch.setattr(
        paddle_api.pd.fleet, "fleet", SimpleNamespace(_user_defined_strategy=strategy)
    )
    assert paddle_api.set_fleet_bucket(4) and strategy.fuse_grad_size_in_MB == 4
    monkeypatch.setattr(paddle_api.pd.fleet, "fleet", SimpleNamespace())
    assert not paddle_api.set_fleet_bucket(8)


def test_threads_that_cannot_be_set_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(paddle_api, "core", SimpleNamespace(set_num_threads=asked.append))
    paddle_api.set_num_threads(2)
    assert asked == [2] and not capsys.readouterr().err
    monkeypatch.setattr(paddle_api, "core", None)
    paddle_api.set_num_threads(2)
    assert "OMP_NUM_THREADS" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "fast"), [("fpu avx512_bf16 sse", True), ("fpu avx512f", False), ("amx_bf16", True)]
)
def test_linux_says_whether_bfloat16_is_fast(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, fast: bool
) -> None:
    monkeypatch.setattr(paddle_api, "core", None)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert paddle_api.has_fast_bfloat16(tmp_path) is fast


def test_this_machine_agrees_about_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    said = paddle_api.has_fast_bfloat16()
    monkeypatch.setattr(paddle_api, "core", None)
    assert paddle_api.has_fast_bfloat16() is said


def test_tf32_is_two_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    turned: list[tuple[str, bool]] = []
    both = {
        f"set_{library}_switch": lambda on, library=library: turned.append((library, on))
        for library in ("cublas", "cudnn")
    }
    monkeypatch.setattr(paddle_api, "core", SimpleNamespace(**both))
    assert paddle_api.set_tf32(False) and turned == [("cublas", False), ("cudnn", False)]
    monkeypatch.setattr(paddle_api, "core", None)
    assert not paddle_api.set_tf32(False)
