"""What Paddle keeps to itself does what ppdist uses it for."""

import paddle
import pytest
from paddle import nn

from ppdist.distributed import paddle_api


def test_a_norm_tells_how_it_was_made_and_takes_another_momentum() -> None:
    norm = nn.BatchNorm2D(3, momentum=0.97, epsilon=1e-3)
    assert (paddle_api.epsilon(norm), paddle_api.momentum(norm)) == (1e-3, 0.97)
    paddle_api.set_momentum(norm, 0.5)
    norm(paddle.ones([2, 3, 4, 4]))
    assert paddle_api.running_statistics(norm)[0].tolist() == [0.5, 0.5, 0.5]


def test_a_frozen_norm_leaves_its_statistics() -> None:
    norm = nn.BatchNorm2D(3)
    x = paddle.randn([2, 3, 5, 5])
    norm.eval()
    expected = norm(x)
    norm.train()
    assert not paddle_api.normalises_by_running(norm)
    paddle_api.normalise_by_running(norm)
    assert paddle_api.normalises_by_running(norm)
    assert bool((norm(x) == expected).all())
    assert paddle_api.running_statistics(norm)[0].tolist() == [0.0, 0.0, 0.0]


def test_the_second_copy_of_loaded_state_goes() -> None:
    model = nn.Linear(3, 2)
    optimizer = paddle.optimizer.Momentum(parameters=model.parameters())
    model(paddle.ones([2, 3])).sum().backward()
    optimizer.step()
    optimizer._accumulators_holder = {"kept": 1}
    paddle_api.forget_loaded_state(optimizer)
    assert optimizer._accumulators_holder == {}


def test_betas_and_momentum_are_the_optimizers() -> None:
    parameters = nn.Linear(3, 2).parameters()
    adamw = paddle.optimizer.AdamW(beta1=0.8, parameters=parameters)
    assert paddle_api.first_power(adamw, "beta1_pow_acc") == pytest.approx(0.8)
    assert paddle_api.first_power(adamw, "moment1") == 0.0
    sgd = paddle.optimizer.Momentum(parameters=[{"params": parameters}])
    assert paddle_api.first_power(sgd, "velocity") == 0.0
    paddle_api.set_optimizer_momentum(sgd, 0.25)
    assert sgd._param_groups[0]["momentum"] == 0.25


def test_groups_are_made_at_the_store_given(monkeypatch: pytest.MonkeyPatch) -> None:
    collective = paddle_api.pd.collective
    monkeypatch.setattr(collective, "_default_store", "usual")
    assert paddle_api.group_store() == "usual"
    with paddle_api.groups_at("another"):
        assert collective._default_store == "another"
    assert collective._default_store == "usual"
