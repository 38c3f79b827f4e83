"""The estimate of a step's memory, and what is read of limits."""

import resource
import sys
import time
from subprocess import run

import numpy as np
import paddle
import pytest

from ppdist.config import load_config
from ppdist.distributed import comm, device
from ppdist.engine import auto_batch
from ppdist.engine.auto_batch import (
    ADDRESSES,
    CARD,
    HOST,
    Estimate,
    Meter,
    estimate,
    free_memory,
    images_that_fit,
    job_of,
    require_memory,
    shown,
    trial_of,
)
from ppdist.engine.build import build_model
from ppdist.models import complexity as counting
from ppdist.models.base import ImageModel, frozen_keys
from ppdist.models.complexity import complexity
from tests.errors import raises
from tests.forked import ROOT
from tests.unit.engine.tiny import SIZE, tiny_config

FAMILIES = ("ppyoloe", "yolov5", "yolov5_cls")
GIB = 1 << 30


def of(model, size=SIZE, moments=1, averaged=True, frozen=()):
    return estimate(
        model, complexity(model, frozen=frozen), sizes=[(size, size)],
        moments=moments, averaged=averaged, frozen=frozen,
    )  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_estimate_counts_optimizer_and_ema_memory(family, tmp_path):
    model = build_model(tiny_config(tmp_path, model=family))
    found = of(model, moments=2)
    everything = sum(value.numpy().nbytes for value in model.state_dict().values())
    trained = sum(p.numpy().nbytes for p in model.parameters() if not p.stop_gradient)
    assert found.state == 3 * everything + 3 * trained
    assert of(model, moments=2, averaged=False).state == 2 * everything + 3 * trained
    assert found.kept == 4 * everything + 4 * trained + auto_batch._LIBRARIES


def test_frozen_layers_keep_no_gradient_or_tensor(tmp_path):
    model = build_model(tiny_config(tmp_path))
    plain, tenth = of(model, moments=2), of(model, moments=2, frozen=frozen_keys(model, 1))
    frozen = frozen_keys(model, ["backbone"])
    still = sum(model.state_dict()[key].numpy().nbytes for key in frozen)
    found = of(model, moments=2, frozen=frozen)
    learned = sum(
        each.numpy().nbytes
        for key, each in model.named_parameters()
        if not each.stop_gradient and key not in frozen
    )
    trained = sum(each.numpy().nbytes for each in model.parameters() if not each.stop_gradient)
    assert plain.state - found.state == still + 3 * (trained - learned)
    assert found.image < tenth.image < plain.image
    assert of(model, moments=2) == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_grow_with_images_and_pixels(family, tmp_path, monkeypatch):
    model = build_model(tiny_config(tmp_path, model=family))
    one = of(model)
    assert one.needs(6, {HOST: 0})[HOST] - one.needs(1, {HOST: 0})[HOST] == 5 * one.image
    assert of(model, size=4 * SIZE).image == pytest.approx(16 * one.image, rel=1e-6)
    small = complexity(model)
    monkeypatch.setattr(counting, "_SIDE", 8)
    large = complexity(model)  # so a small one is enough
    for name in ("saved", "operations"):
        assert getattr(small, name).fixed == 0
        assert getattr(large, name).pixel == pytest.approx(getattr(small, name).pixel, rel=0.1)


def test_one_pass_counts_what_backward_needs_and_operations():
    """Of y = relu(conv(x)): the convolution keeps x, the relu its result."""

    class Known(ImageModel):
        def __init__(self):
            super().__init__(1, 8, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
            self.conv = paddle.nn.Conv2D(3, 5, 3, padding=1)

        def normalize(self, images):
            return images.astype("float32")

        def forward(self, images):
            return paddle.nn.functional.relu(self.conv(images))

    found = complexity(Known())
    assert (found.parameters, found.operations) == (5 * 3 * 9 + 5, (0, 2 * 5 * 3 * 9))
    assert found.outputs == (0, 5 * 4)
    assert 3 * 4 + 5 * 4 <= found.saved.pixel <= 3 * 4 + 2 * 5 * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_estimate_leaves_model_and_rng_unchanged(family, tmp_path):
    model = build_model(tiny_config(tmp_path, model=family))
    model.train()
    still = model.sublayers()[3]
    still.eval()
    before = {key: value.numpy().copy() for key, value in model.state_dict().items()}
    modes = [layer.training for layer in model.sublayers(include_self=True)]
    paddle.seed(3)
    expected = paddle.rand([4]).numpy()
    paddle.seed(3)
    of(model)
    assert (paddle.rand([4]).numpy() == expected).all()
    assert modes == [layer.training for layer in model.sublayers(include_self=True)]
    for key, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), before[key])
    assert all(p.grad is None for p in model.parameters())


# Config, batch, overrides: what docs/dev/memory_estimate.md shows.
MEASURED = {
    "PP-YOLOE+ s, 320": ("ppyoloe/ppyoloe_plus_s_80e_coco", 4, (320, 320)),
    "PP-YOLOE+ m, 320": ("ppyoloe/ppyoloe_plus_m_80e_coco", 2, (320, 320)),
    "PP-YOLOE+ quarter width, BCCD": ("examples/bccd_ppyoloe", 8, (256, 320)),
    "YOLOv5 n, 320": ("yolov5/yolov5n_300e_coco", 8, (320, 320)),
    "YOLOv5 s, 416": ("yolov5/yolov5s_300e_coco", 4, (416, 416)),
    "YOLOv5 s classifier, 224": ("yolov5/yolov5s_cls_imagenet", 8, (224, 224)),
    "D-FINE n, 320": ("dfine/dfine_n_160e_coco", 4, (320, 320)),
    "RT-DETR r18, 320": ("rtdetr/rtdetr_r18_72e_coco", 2, (320, 320)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MEASURED)
def test_the_estimate_is_near_what_steps_take(case, record_property):
    name, batch, (height, width) = MEASURED[case]
    sizes = [f"model.image_size=[{height},{width}]", "train.multi_scale=[]"]
    config = load_config(ROOT / "configs" / f"{name}.yml", sizes)
    model = build_model(config)
    expected = estimate(
        model, complexity(model, config.train.amp), sizes=[(height, width)],
        moments=1 if config.optimizer.name == "momentum" else 2,
        averaged=config.train.ema.enabled,
    ).needs(batch, {HOST: 0})[HOST]  # fmt: skip
    trial = trial_of(job_of(config, 20, 1000), {HOST: 1 << 50}, time.monotonic() + 600)
    took, why = trial([batch])
    assert why == ""
    off = expected / took[batch][HOST] - 1
    figure = f"{case}, batch {batch}: {shown(took[batch][HOST])}, {shown(expected)}, {off:+.0%}"
    record_property("figure", figure)
    print(figure)
    assert abs(off) < 0.35


@pytest.mark.parametrize(
    ("free", "images"),
    [(100 * GIB, 4096), (11 * GIB, 2048), (2 * GIB, 256), (GIB // 4, 32), (1, 0)],
)
def test_a_batch_that_fits_is_a_power_of_two(free, images):
    most = 5000 if free < 50 * GIB else 4096
    expected = Estimate(4, 20 * GIB // most, auto_batch._LIBRARIES)
    assert images_that_fit(expected, most, {HOST: free}) == images


def test_a_step_of_several_times_the_memory_is_refused(monkeypatch):
    there = {HOST: 2 * GIB, ADDRESSES: 100 * GIB}
    monkeypatch.setattr(auto_batch, "free_memory", lambda ranks: there)
    expected = Estimate(4, 3 * GIB // 4, auto_batch._LIBRARIES)
    short, warnings = require_memory(expected, 4)
    assert short.startswith("a step of 4 images takes about")
    assert warnings == [
        "a step of 4 images is estimated to take 3.06 GiB of the memory of the host, and rank 0 "
        f"(host {comm.host()}) has 2 GiB left; use --batch 2 or --batch auto (with -c: "
        "train.batch_size_per_card)"
    ]
    with raises("batch_exceeds_memory") as caught:
        require_memory(Estimate(4, 20 * GIB // 5000, auto_batch._LIBRARIES), 5000)
    assert caught.value.fix.startswith("use --batch 256 or --batch auto")
    monkeypatch.setitem(there, HOST, 50 * GIB)
    assert require_memory(expected, 4)[1] == []


def test_a_card_that_does_not_say_what_is_free_is_left_out(monkeypatch):
    monkeypatch.setattr(auto_batch, "_free_on_card", lambda: None)
    monkeypatch.setattr(device, "on_accelerator", lambda: True)
    assert CARD not in free_memory(1)
    line, warnings = require_memory(Estimate(4, 1, 1), 4)
    assert line.startswith("a step of 4 images takes about 0 MiB of") and warnings == []


@pytest.mark.slow
def test_host_memory_is_shared_but_limit_is_per_rank():
    alone, shared = free_memory(1), free_memory(4)
    assert shared[HOST] == pytest.approx(alone[HOST] / 4, rel=0.1)
    assert ADDRESSES not in alone
    code = (
        "from ppdist.common.machine import process_memory\n"
        "from ppdist.engine.auto_batch import ADDRESSES, free_memory\n"
        "import resource\n"
        "limit = process_memory()['VmSize'] + (1 << 30)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "print(free_memory(4)[ADDRESSES])\n"
    )
    found = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout.split()[-1]) == pytest.approx(GIB, rel=0.05)
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@pytest.mark.slow
def test_a_meter_sees_what_was_taken_and_given_back():
    code = (
        "from ppdist.engine.auto_batch import HOST, ADDRESSES, Meter\n"
        "meter = Meter()\n"
        "taken = bytearray(200 << 20)\n"
        "taken[::4096] = b'1' * len(taken[::4096])\n"
        "del taken\n"
        "peak = meter.peak()\n"
        "print(peak[HOST] >> 20, peak[ADDRESSES] >> 20)\n"
    )
    found = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(199 <= int(number) < 230 for number in found.stdout.split()[-2:])
    assert Meter().peak()[HOST] >= 0
