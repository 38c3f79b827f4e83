"""Callbacks are called at the moments of a run, in their order."""

import pytest

from ppdist.data.datasets.synthetic import make_shapes
from ppdist.engine.callbacks import Callback
from tests.errors import raises
from tests.unit.engine.runs import run_to_end
from tests.unit.engine.tiny import FASTEST

EPOCHS = 2  # of one step each


class Noting(Callback):
    """Writes down what it is called with."""

    def __init__(self, moments):
        self.moments = moments

    def on_train_begin(self, run):
        self.moments.append(("train begins", run.done_steps, run.total_steps, run.output_dir))

    def on_step_begin(self, step):
        self.moments.append(("step begins", step))

    def on_step_end(self, step, result, lr, seconds):
        assert result.applied and lr > 0 and 0 < seconds.data < seconds.wall
        self.moments.append(("step ends", step))

    def on_evaluate_end(self, step, metrics, is_best):
        assert "mAP" in metrics and is_best
        self.moments.append(("evaluated", step))

    def on_epoch_end(self, epoch, step, numbers):
        assert {"loss", "loss_cls", "lr", "images_per_second", "seconds"} <= {*numbers}
        self.moments.append(("epoch ends", epoch, step, "mAP" in numbers))

    def on_save(self, step):
        self.moments.append(("saved", step))

    def on_train_end(self, step, reason):
        self.moments.append(("train ends", step, reason))


def train(data, output_dir, callbacks):
    own = [f"train.epochs={EPOCHS}", "evaluate.every_epochs=2", "checkpoint.every_steps=1"]
    run_to_end(data, output_dir, *own, model=FASTEST, evaluate=True, callbacks=callbacks)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    make_shapes(folder, train=8, val=2, size=64, seed=0)
    return folder


def test_every_moment_is_called_in_the_order_of_the_loop(shapes, tmp_path):
    moments = []
    train(shapes, tmp_path, [Noting(moments), Noting(moments)])
    first, second = moments[::2], moments[1::2]
    assert first == second
    assert first == [
        ("train begins", 0, EPOCHS, tmp_path),
        ("step begins", 1),
        ("step ends", 1),
        ("epoch ends", 1, 1, False),
        ("saved", 1),
        ("step begins", 2),
        ("step ends", 2),
        ("evaluated", 2),
        ("epoch ends", 2, 2, True),
        ("saved", 2),
        ("train ends", 2, "total"),
    ]


def test_a_method_that_no_moment_calls_is_an_error():
    with raises("callback_unknown", "on_epoch_begin; did you"):
        type("Mine", (Callback,), {"on_epoch_begin": lambda self: None})
    type("Mine", (Noting,), {"on_save": lambda self, step: None, "one": 1})
