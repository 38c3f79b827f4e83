"""Checks before a run: ranks agree, and the all-reduce works.

Everything before the first all-reduce goes through the store, which works where the network between
the ranks does not.
"""

import faulthandler
import importlib.metadata
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import cv2
import numpy as np
import paddle

import ppdist
from ppdist.common import addresses
from ppdist.common.code_digest import digests_of_package
from ppdist.common.errors import ConfigError, LaunchError, WeightsError
from ppdist.common.files import digest_of_file
from ppdist.common.job import MIN_HOSTS_VARIABLE, PER_HOST_KEYS, RUN_NOTE, read_note
from ppdist.common.process import unknown_paddle
from ppdist.common.retry import unavailable
from ppdist.config import plugins
from ppdist.config.distributed import DistributedConfig
from ppdist.config.experiment import ExperimentConfig
from ppdist.config.parse import flattened
from ppdist.cpu.precision import BFLOAT16, Kernels
from ppdist.distributed import comm, device
from ppdist.distributed.agreement import Facts, require_agreement
from ppdist.distributed.store import interfaces
from ppdist.engine.continuation import ANEW, AUTO, Continuation
from ppdist.models.model_card import require_fit
from ppdist.models.weights import checkpoint_of, digest_of_weights
from ppdist.models.zoo import entry_of, is_name, local_weights
from ppdist.storage import stores
from ppdist.storage.download import sha256_of
from ppdist.storage.files import STORAGE

_SUM_SECONDS = 60.0  # gloo itself gives up after 30


def preflight(
    config: ExperimentConfig,
    *,
    evaluate: bool,
    resume: Continuation = ANEW,
    kernels: Kernels = BFLOAT16,
) -> list[str]:
    """Checks whether the run can start, after `comm.init`, before anything else.  Collective.

    Args:
        evaluate: True if `--eval` was given.
        kernels: the kernels that a CPU uses for bfloat16.
    Returns: warnings.
    Raises: UserError, on every rank: this card cannot compute as configured, the ranks differ, or
        the all-reduce fails; early stopping is configured without evaluations; the weights are,
        judging by their name, the published weights of another detector.
    """

    def check_rank() -> None:
        check_precision(config, kernels)
        if config.distributed.shares is not None:
            check_shares(config.distributed)
        if config.model.pretrained:
            require_fit(config.model, config.model.pretrained)

    # One call for all checks: configurations are not compared yet, so ranks might otherwise make
    # different collective calls.
    comm.run_on_all_ranks(check_rank)
    if comm.world_size() > 1:
        options = {
            "--eval": f"{evaluate}",
            "--resume": AUTO if resume.source == AUTO else f"{resume.source is not None}",
            "--resume-changed": f"{resume.changed}",
        }
        require_agreement(
            {
                "command line": options,
                "versions": versions(),
                "code": digests_of_code(),
                "config": flat_config(config),
            }
        )
    if config.early_stopping is not None and not evaluate:
        raise ConfigError(
            "early_stopping needs evaluations",
            code="evaluation_missing",
            fix="start with --eval, or set early_stopping: null",
        )
    require_sum()
    unknown = unknown_paddle(paddle.__version__)
    return [unknown] if unknown else []


def inputs_of(config: ExperimentConfig, *, evaluate: bool, anew: bool = False) -> list[Path]:
    """Lists the files and folders that a run reads.

    Args:
        evaluate: whether the validation set is read, too.
        anew: whether the run starts without a checkpoint, so that pretrained weights are read.
    """
    splits = [config.data.train, config.data.val][: 1 + evaluate]
    paths = [
        addresses.folder_of(config.data.root, name)
        for split in splits
        for name in (*split.image_folders, *split.annotation_files)
    ]
    if anew and config.model.pretrained and not is_name(config.model.pretrained):
        paths.append(Path(config.model.pretrained))
    if config.distill is not None:
        paths.append(Path(config.distill.teacher))
    return paths


def wait_for_inputs(config: ExperimentConfig, *, evaluate: bool, anew: bool) -> None:
    """Waits for storage that an earlier attempt of the job has read from.  Collective.

    A host that took part in no earlier attempt does not wait: its storage may never appear.

    Args: see `inputs_of`.
    Raises: StorageError, on every rank: the storage stays unavailable on some host.
    """
    paths = inputs_of(config, evaluate=evaluate, anew=anew)
    seconds = None if read_note(RUN_NOTE) else 0.0

    def look() -> None:
        for path in paths:
            if addresses.is_remote(path):
                with suppress(OSError):  # any response will do: not every store has folders
                    stores.identity_of(path)
            elif not STORAGE.can_be_read(path):
                message = "cannot be read, though an earlier attempt of this job has read it"
                raise unavailable(message, f"{path}")

    comm.run_on_all_ranks(lambda: comm.once_there(look, seconds))


def check_precision(config: ExperimentConfig, kernels: Kernels = BFLOAT16) -> None:
    """Checks that this rank's device supports the configured precision.

    The results of a CPU are checked later, with the model (`build.check_low_precision`).

    Args: kernels: the kernels that a CPU uses for bfloat16.
    Raises: ConfigError: this rank's device cannot compute in `train.amp`, or cannot sum in
        `distributed.gradient_dtype`.
    """
    amp, sums = config.train.amp, config.distributed.gradient_dtype
    if sums == "float16" and not device.on_accelerator() and comm.world_size() > 1:
        raise ConfigError(
            "float16, but this run is on CPU, where gloo sums float16 to infinity",
            code="gradient_dtype_on_cpu",
            where="distributed.gradient_dtype",
            fix="set bfloat16, which has the same size, or float32",
        )
    if not amp.enabled:
        return
    if device.on_accelerator():
        supported = {
            "float16": paddle.amp.is_float16_supported,
            "bfloat16": paddle.amp.is_bfloat16_supported,
        }
        if not supported[amp.dtype]():
            raise ConfigError(
                f"{amp.dtype} is not supported by this card, and Paddle would silently compute in "
                "float32",
                code="amp_dtype_unsupported",
                where="train.amp.dtype",
                fix="set the other one, or train.amp.enabled: false",
            )
    elif missing := kernels.missing():
        raise ConfigError(
            f"true, but on host {comm.host()} {missing}",
            code="amp_on_cpu",
            where="train.amp.enabled",
            fix="set train.amp.enabled: false, or use a processor with AVX512-BF16 or AMX, or a "
            "GPU",
        )
    elif amp.dtype != "bfloat16":
        raise ConfigError(
            f"{amp.dtype}, but this run is on CPU, where oneDNN only trains in bfloat16",
            code="amp_dtype_on_cpu",
            where="train.amp.dtype",
            fix="set bfloat16, or train.amp.enabled: false",
        )
    elif config.train.cpu_kernels == "plain":
        raise ConfigError(
            "plain, but only oneDNN computes in bfloat16 on a CPU",
            code="amp_needs_onednn",
            where="train.cpu_kernels",
            fix="set auto, or train.amp.enabled: false",
        )


def check_shares(ranks: DistributedConfig) -> None:
    """Checks that `distributed.shares` fits every number of ranks that the run may have.

    Raises: ConfigError: it does not fit some number of ranks.
    """
    ranks.speeds(comm.world_size())
    if MIN_HOSTS_VARIABLE in os.environ:
        raise ConfigError(
            f"these are of {len(ranks.shares or ())} ranks, and the run is to go on with fewer",
            code="shares_of_one_world",
            where="distributed.shares",
            fix="share evenly (null), or start without --min_hosts",
        )


def versions() -> Facts:
    """Returns the versions of everything that affects the numbers of a run."""
    return {
        "ppdist": ppdist.__version__,
        "paddle": paddle.__version__,
        "numpy": np.__version__,
        "opencv": cv2.__version__,
        "pydantic": importlib.metadata.version("pydantic"),
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def fetch_on_all_ranks(weights: Path | str | None) -> None:
    """Downloads published weights on every host, and checks that they are equal.  Collective.

    The first rank of each host downloads; the other ranks wait as long as data keep arriving.

    Args: weights: as specified by the user; None, or anything but a name, needs no download.
    Raises: the errors of `local_weights`, with the same kind and code on every rank; WeightsError:
        two hosts have files with different content.
    """
    if weights is None or entry_of(weights) is None:
        return

    def fetch() -> str | None:
        if comm.local_rank() or not is_name(weights):
            return None
        file = local_weights(weights, comm.alive)
        return sha256_of(file) if comm.world_size() > 1 else None

    sums_W = comm.all_gather_object(comm.run_on_all_ranks(fetch))
    sums = {digest: rank for rank, digest in reversed([*enumerate(sums_W)]) if digest}
    if len(sums) > 1:
        (first_digest, first_rank), (second_digest, second_rank) = [*sums.items()][:2]
        raise WeightsError(
            f"rank {first_rank} has a file of SHA-256 {first_digest}, rank {second_rank} one of "
            f"{second_digest}",
            code="weights_differ",
            where=f"{weights}",
            fix="delete the wrong one from its host's cache",
        )


def digests_of_code() -> Facts:
    """Returns a digest of each file of the package, of the plugins and of the script being run."""
    script = Path(sys.argv[0])
    started = {script.name: digest_of_file(script)} if script.is_file() else {}
    return digests_of_package() | _digest_plugins() | started


def _digest_plugins() -> Facts:
    """Returns digests of the files of the packages and modules that plugins come from."""
    return {
        f"{name}/{path.relative_to(place).as_posix()}" if place != path else path.name: (
            digest_of_file(path)
        )
        for name in plugins.packages()
        for place in _find_sources(name)
        for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])
    }


def _find_sources(name: str) -> list[Path]:
    """Finds the folders of a package or the file of a module, imported or not; [] if not found."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    with suppress(ImportError, ValueError):
        spec = spec or importlib.util.find_spec(name)  # imports nothing
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [*map(Path, spec.submodule_search_locations)]
    return [Path(spec.origin)] if spec.has_location and spec.origin else []


def flat_config(config: ExperimentConfig) -> Facts:
    """Returns the values that must match on all ranks: key path -> JSON."""
    facts = {
        key: json.dumps(value)
        for key, value in flattened(config).items()
        if key not in PER_HOST_KEYS
    }
    for key, path in _list_weights(config).items():
        facts[f"{key} (its content)"] = digest_of_weights(path)
    return facts


def _list_weights(config: ExperimentConfig) -> dict[str, Path]:
    """Lists the weights that a run reads at its start, by key."""
    paths = {"model.pretrained": config.model.pretrained}
    if config.distill is not None:
        paths["distill.teacher"] = config.distill.teacher
    return {key: Path(path) for key, path in paths.items() if path}


def require_sum() -> None:
    """Checks the all-reduce with a sum whose result is known in advance.  Collective.

    Raises: LaunchError: on every rank, the result is wrong; on the ranks that reached the
        all-reduce, other ranks did not.
    """
    world = comm.world_size()
    if world == 1:
        return
    ranks = paddle.full([1024], float(comm.rank() + 1), dtype="float32")
    absent = comm.announce_arrival()
    began = time.monotonic()
    try:
        with within(_SUM_SECONDS, "the first all-reduce", absent):
            sums = comm.all_reduce_sum(ranks).numpy()
    except (RuntimeError, ValueError, OSError) as error:  # the types of gloo's errors in Python
        missing = absent()
        if not missing:
            raise
        raise LaunchError(
            f"{missing} did not reach the first all-reduce within {time.monotonic() - began:.0f} "
            "s: its log says why, or it hangs (stopped, or waiting for a disk)",
            code="rank_timeout",
        ) from error
    expected = world * (world + 1) / 2

    def check() -> None:
        if not (sums == expected).all():
            wrong_sum = sums[sums != expected][0]
            raise LaunchError(
                f"an all-reduce over {world} ranks gave {wrong_sum:g} instead of {expected:g} on "
                f"host {comm.host()}: the transport is broken",
                code="all_reduce_wrong",
                fix="on GPUs try NCCL_P2P_DISABLE=1, and look at NCCL_DEBUG=INFO",
            )

    comm.run_on_all_ranks(check)


@contextmanager
def within(seconds: float, what: str, absent: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Terminates this process with a message if the block takes too long.

    An exception could not end it, because Paddle, gloo or NCCL then hangs in native code.

    Args:
        what: what the block does, as a noun for the message.
        absent: returns the names of the ranks that have not reached the block.
    """

    def end() -> None:
        print(
            f"ppdist: rank {comm.rank()} on host {comm.host()}: {what} did not complete "
            f"within {seconds:g} s; possible causes: a firewall between the hosts, a wrong "
            f"interface ({interfaces(os.environ)}), or a rank that hangs: see the logs of the "
            f"others, and on GPUs NCCL_DEBUG=INFO",
            file=sys.stderr,
            flush=True,
        )
        missing = absent()  # last, because the store may hang as well
        if missing:
            print(f"ppdist: {missing} did not reach it", file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    # Native code may hold the interpreter lock (GIL), and then a timer thread never runs.
    faulthandler.dump_traceback_later(seconds + 5, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def keep_sources(config: ExperimentConfig, output_dir: Path) -> None:
    """Refuses to start a new run whose inputs would be moved aside with old checkpoints.

    Raises: ConfigError: `model.pretrained` or the teacher is among the checkpoints in output_dir.
    """
    checkpoints = (output_dir / "checkpoints").resolve()
    for key, source in _list_weights(config).items():
        if checkpoint_of(source).resolve().is_relative_to(checkpoints):
            raise ConfigError(
                f"{source} is in {output_dir}, where this run would write",
                code="out_holds_source",
                where=f"{key}",
                fix=(
                    "give the new run its own folder: -o output_dir=PATH (to resume the run "
                    "there: --resume)"
                ),
            )
