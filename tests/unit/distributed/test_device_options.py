"""What is set for a card, looked at without one: flags and calls are recorded."""

import os
from typing import Any

import paddle
import pytest

from ppdist.config.train import GPUConfig, TrainConfig
from ppdist.distributed import device_options
from ppdist.distributed.device_options import set_device_options
from ppdist.distributed.store import set_timeout
from tests.errors import raises

GPU_KEYS = ({"cudnn_search": True}, {"layout_autotune": True}, {"tf32": True}, {"tf32": False})
OF_CARDS = (
    "FLAGS_cudnn_deterministic",
    "FLAGS_embedding_deterministic",
    "FLAGS_cudnn_exhaustive_search",
    "FLAGS_cublas_allow_tf32",
    "FLAGS_cudnn_allow_tf32",
)


def of_gpu(**keys: Any) -> TrainConfig:
    return TrainConfig(gpu=GPUConfig(**keys))


class Card:
    """A GPU build of Paddle: what it is told, and which flags it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flags: dict[str, Any] = {}
        self.calls: list[Any] = []
        self.known: tuple[str, ...] = OF_CARDS
        self.has_switches = True
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "")  # so that it is as before after the test
        monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
        monkeypatch.setattr(paddle.device, "get_device", lambda: "gpu:1")
        monkeypatch.setattr(paddle, "set_flags", self._set_flags)
        monkeypatch.setattr(paddle.incubate.autotune, "set_config", self.calls.append)
        monkeypatch.setattr(device_options.paddle_api, "set_tf32", self._set_tf32)

    def _set_flags(self, flags: dict[str, Any]) -> None:
        if not flags.keys() <= set(self.known):
            raise ValueError(f"Flag {flags} cannot set its value through this function.")
        self.flags |= flags

    def _set_tf32(self, allow: bool) -> bool:
        self.calls.append(allow)
        return self.has_switches


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(monkeypatch)


def test_by_default_nothing_is_set(card: Card) -> None:
    set_device_options(TrainConfig())
    assert (card.flags, card.calls) == ({}, [])


def test_deterministic_sets_two_flags(card: Card) -> None:
    set_device_options(TrainConfig(deterministic=True))
    assert card.flags == {"FLAGS_cudnn_deterministic": True, "FLAGS_embedding_deterministic": 1}


def test_cudnn_searches_and_paddle_chooses_layouts(card: Card) -> None:
    set_device_options(of_gpu(cudnn_search=True))
    assert card.flags == {"FLAGS_cudnn_exhaustive_search": True} and not card.calls
    set_device_options(of_gpu(layout_autotune=True))
    assert card.calls == [{"layout": {"enable": True}}]


@pytest.mark.parametrize("allow", [True, False])
def test_tf32_is_set_by_flags_and_by_switches(card: Card, allow: bool) -> None:
    set_device_options(of_gpu(tf32=allow))
    assert card.flags == dict.fromkeys(OF_CARDS[3:], allow) and card.calls == [allow]
    assert os.environ.get("NVIDIA_TF32_OVERRIDE") == (None if allow else "0")
    card.known = ()
    set_device_options(of_gpu(tf32=allow))  # an older Paddle has the switches alone


def test_what_this_paddle_lacks_is_refused(card: Card) -> None:
    card.known, card.has_switches = (), False
    for train, key in (
        (TrainConfig(deterministic=True), "train.deterministic"),
        (of_gpu(cudnn_search=True), "train.gpu.cudnn_search"),
        (of_gpu(tf32=True), "train.gpu.tf32"),
    ):
        with raises("gpu_option_unknown") as raised:
            set_device_options(train)
        assert (raised.value.code, raised.value.where) == ("gpu_option_unknown", key)
    set_device_options(of_gpu(tf32=False))  # NVIDIA's libraries obey their variable


def test_an_environment_that_forbids_tf32_is_told(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    with raises("tf32_forbidden"):
        set_device_options(of_gpu(tf32=True))


@pytest.mark.parametrize("keys", GPU_KEYS)
def test_options_of_gpus_are_refused_on_cpu(keys: dict[str, Any]) -> None:
    with raises("gpu_option_elsewhere") as raised:
        set_device_options(of_gpu(**keys))
    assert raised.value.where == f"train.gpu.{next(iter(keys))}"


def test_a_cpu_is_deterministic_anyway() -> None:
    set_device_options(TrainConfig(deterministic=True))
    set_device_options(TrainConfig())


def test_flags_that_this_build_lacks_are_not_taken() -> None:
    if paddle.device.is_compiled_with_cuda():
        pytest.skip("this build has them")
    assert not any(device_options._takes(flag, True) for flag in OF_CARDS)
    assert device_options._takes("FLAGS_check_nan_inf", False)
    assert paddle.get_flags("FLAGS_check_nan_inf") == {"FLAGS_check_nan_inf": False}


@pytest.mark.gpu
def test_a_card_takes_every_option() -> None:
    if not paddle.device.is_compiled_with_cuda():
        pytest.skip("needs a GPU build of Paddle")
    set_device_options(TrainConfig(deterministic=True, gpu=GPUConfig(tf32=False)))
    assert paddle.get_flags("FLAGS_cudnn_deterministic")["FLAGS_cudnn_deterministic"]


def test_nccl_waits_as_long_as_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_PG_TIMEOUT", "1")  # so that it is as before after the test
    try:
        set_timeout(12.5)
        assert paddle.distributed.ParallelEnv().pg_timeout == 12500
    finally:
        set_timeout(1800.0)
