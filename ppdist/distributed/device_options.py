"""How a card computes: deterministic algorithms, cuDNN's search, layout, TF32.

Nothing here was run on a GPU.  The flags are those of Paddle's documentation and sources (3.3.1);
tests look at what is set.
"""

import os

import paddle

from ppdist.common.errors import ConfigError
from ppdist.config.train import TrainConfig
from ppdist.distributed import device, paddle_api

_TF32_FLAGS = ("FLAGS_cublas_allow_tf32", "FLAGS_cudnn_allow_tf32")
# cuBLAS and cuDNN read it when they are first used, and obey it in whatever Paddle asks of them.
_TF32_VARIABLE = "NVIDIA_TF32_OVERRIDE"


def set_device_options(train: TrainConfig) -> None:
    """Makes this rank's card compute as `train.gpu` and `train.deterministic` say.

    Before the first product or convolution.  What is off is left as Paddle, or a FLAGS_ variable of
    the user's, has it.

    Raises: ConfigError: this run is not on a GPU, or this Paddle lacks the option.
    """
    options, kind = train.gpu, device.kind()
    asked = {
        "train.gpu.cudnn_search": options.cudnn_search,
        "train.gpu.layout_autotune": options.layout_autotune,
        "train.gpu.tf32": options.tf32 is not None,
    }
    for key, given in asked.items():
        if given and kind != "gpu":
            raise ConfigError(
                f"was given, but this run is on {kind}, where it has no effect",
                code="gpu_option_elsewhere",
                where=key,
                fix="leave it out, or use a GPU",
            )
    if train.deterministic and kind != device.CPU:  # CPU kernels are
        _set("train.deterministic", "FLAGS_cudnn_deterministic", True)
        _set("train.deterministic", "FLAGS_embedding_deterministic", 1)
    if options.cudnn_search:
        _set("train.gpu.cudnn_search", "FLAGS_cudnn_exhaustive_search", True)
    if options.layout_autotune:
        paddle.incubate.autotune.set_config({"layout": {"enable": True}})
    if options.tf32 is not None:
        _set_tf32(options.tf32)


def _set(key: str, flag: str, value: bool | int) -> None:
    if not _takes(flag, value):
        raise ConfigError(
            f"{flag} is unknown to the installed Paddle {paddle.__version__} on {device.kind()}",
            code="gpu_option_unknown",
            where=key,
            fix="leave the key out, or install another build of Paddle",
        )


def _takes(flag: str, value: bool | int) -> bool:
    try:
        paddle.set_flags({flag: value})
    except ValueError:  # what Paddle raises for flags that its build does not have
        return False
    return True


def _set_tf32(allow: bool) -> None:
    """Sets TF32 by flags, in older versions of Paddle by switches.

    Some versions obey the flags in forward only, so NVIDIA's libraries are also told to disable it.
    """
    flags, switches = [_takes(flag, allow) for flag in _TF32_FLAGS], paddle_api.set_tf32(allow)
    if not allow:
        os.environ[_TF32_VARIABLE] = "0"
    elif os.environ.get(_TF32_VARIABLE) == "0":
        raise ConfigError(
            f"true, but the environment has {_TF32_VARIABLE}=0, which forbids it",
            code="tf32_forbidden",
            where="train.gpu.tf32",
            fix=f"unset {_TF32_VARIABLE}, or leave the key out",
        )
    elif not (all(flags) or switches):
        raise ConfigError(
            f"the installed Paddle {paddle.__version__} has no switch for it",
            code="gpu_option_unknown",
            where="train.gpu.tf32",
            fix="leave the key out, or install another build of Paddle",
        )
