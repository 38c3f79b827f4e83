"""Injects faults into a running training, as a callback.

Nothing in the code that trains knows of faults: what must go wrong inside a step is hung into the
model, the loss or the system call that is to fail.
"""

import ctypes
import errno
import io
import math
import mmap
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from ppdist.common import files, writers
from ppdist.common.errors import ConfigError
from ppdist.common.job import RESTART_VARIABLE
from ppdist.common.process import say
from ppdist.data.image import is_image_name
from ppdist.distributed import collectives, comm
from ppdist.engine.callbacks import Callback, TrainingRun
from tests.faults import clock
from tests.faults import fault as faults
from tests.faults.fault import Fault

_LONG_SECONDS = 10**6
_MANTISSA_BIT = 1 << 22  # the highest: the weight changes by a third to a half and stays finite


class FaultInjector(Callback):
    """Strikes this rank with its faults when it begins their steps."""

    def __init__(self, planned: Sequence[Fault]) -> None:
        """Args: planned: of all ranks, the same on every rank."""
        self.planned = planned
        self.pending: list[Fault] = []
        self.pause_seconds = 0.0  # before each step
        self.hooks: list[list[Any]] = []  # for how many more steps each stays, and itself
        for fault in planned:  # before the data are read
            if fault.kind == "slow-stat" and fault.rank == comm.rank():
                _slow_stat(fault.value)

    def on_train_begin(self, run: TrainingRun) -> None:
        """A run that begins anew, and was not restarted by fleetrun, forgets what struck before.

        Raises: ConfigError: a fault is of a rank that there is not; on every rank.
        """
        self.train_step = run.train_step
        self.evaluated_model = run.evaluated_model
        self.output_dir = output_dir = run.output_dir
        for fault in self.planned:
            if fault.rank >= comm.world_size():
                raise ConfigError(
                    f"there is no rank {fault.rank}: ranks are 0 to {comm.world_size() - 1}",
                    code="fault_invalid",
                    where=f"{faults.VARIABLE}: {fault}",
                )
        self.pending = [fault for fault in self.planned if fault.rank == comm.rank()]
        if not self.pending:
            return
        output_dir.mkdir(parents=True, exist_ok=True)
        if run.done_steps == 0 and not os.environ.get(RESTART_VARIABLE):
            faults.struck_file(output_dir, comm.rank()).unlink(missing_ok=True)
        # By what they say, and equal ones one by one: PPDIST_FAULT may be another one by now.
        for struck in faults.struck(output_dir, comm.rank()):
            same = [fault for fault in self.pending if str(fault) == struck["fault"]]
            if same:
                self.pending.remove(same[0])
        if any(fault.kind.startswith("storage-") for fault in self.pending):
            self.prepare_storage()

    def on_step_begin(self, step: int) -> None:
        for entry in self.hooks:  # steps as they are made: after a rollback some are made again
            entry[0] -= 1
            if entry[0] == 0:
                entry[1].remove()
        for fault in [fault for fault in self.pending if fault.step == step]:
            if fault.kind != "poison":  # which strikes again and again
                self.pending.remove(fault)
                faults.write_down(self.output_dir, fault)
            say(f"fault on purpose: {fault}")
            ACTIONS[fault.kind](self, fault)
        if self.pause_seconds:
            time.sleep(self.pause_seconds)

    def slow(self, fault: Fault) -> None:
        self.pause_seconds += fault.value

    def prepare_storage(self) -> None:
        """Before data workers are forked: they share until when images fail or block."""
        self.away_until = np.frombuffer(mmap.mmap(-1, 16), np.float64)
        opened: Callable[[str, int], int] = vars(files)["_open_at_once"]

        def away(path: str, flags: int) -> int:
            if is_image_name(os.path.basename(path)):
                fails, blocks = self.away_until - time.monotonic()
                time.sleep(max(0.0, blocks))
                if fails > 0:
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
            return opened(path, flags)

        vars(files)["_open_at_once"] = away

    def storage(self, fault: Fault) -> None:
        self.away_until[int(fault.kind == "storage-blocks")] = time.monotonic() + fault.value

    def nan(self, fault: Fault) -> None:
        def poisoned(loss: Any, arguments: Any, output: Any) -> Any:
            return type(output)(output.total * math.nan, *output[1:])

        loss: Any = self.train_step.loss
        hook = loss.register_forward_post_hook(poisoned)
        self.hooks.append([int(fault.value), hook])

    def oom(self, fault: Fault) -> None:
        error = MemoryError(f"ResourceExhaustedError: out of memory on purpose: {fault}")
        self.raise_in_forward(self.train_step.model, error)

    def eval_error(self, fault: Fault) -> None:
        error = RuntimeError(f"fault on purpose: {fault}")
        self.raise_in_forward(self.evaluated_model, error)

    def raise_in_forward(self, model: paddle.nn.Layer, error: Exception) -> None:
        """In the next one; only once."""

        def fail(*_: Any) -> None:
            hook.remove()
            raise error

        hook = model.register_forward_pre_hook(fail)

    def poison(self, fault: Fault) -> None:
        """A step whose batches are skipped computes nothing and lives."""
        hook = self.train_step.model.register_forward_pre_hook(lambda *_: _kill())
        self.hooks.append([1, hook])

    @paddle.no_grad()
    def flip(self, fault: Fault) -> None:
        weights = self.train_step.model.parameters()
        largest = max(weights, key=lambda weight: weight.size)
        array = np.array(largest.astype("float32").numpy())
        array.view(np.int32).ravel()[0] ^= _MANTISSA_BIT
        paddle.assign(paddle.to_tensor(array).astype(largest.dtype), largest)


def _slow_stat(seconds: float) -> None:
    stat = os.stat

    def slow(path: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str) and is_image_name(os.path.basename(path)):
            time.sleep(seconds)
        return stat(path, **options)

    vars(os)["stat"] = slow


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _signal(number: int) -> Callable[[FaultInjector, Fault], None]:
    return lambda injector, fault: os.kill(os.getpid(), number)


def _read_nothing(injector: FaultInjector, fault: Fault) -> None:
    ctypes.string_at(0)


def _raise(injector: FaultInjector, fault: Fault) -> None:
    raise RuntimeError(f"fault on purpose: {fault}")


def _exit(injector: FaultInjector, fault: Fault) -> None:
    raise SystemExit(0)


def _hang(injector: FaultInjector, fault: Fault) -> None:
    while True:
        time.sleep(_LONG_SECONDS)


def _hang_with_lock(injector: FaultInjector, fault: Fault) -> None:
    library = ctypes.PyDLL(None)  # unlike CDLL it does not let go of the interpreter's lock
    while True:
        library.sleep(_LONG_SECONDS)


def _skip_sum(injector: FaultInjector, fault: Fault) -> None:
    before = collectives.all_reduce_sum

    def skip(tensor: paddle.Tensor) -> paddle.Tensor:
        vars(collectives)["all_reduce_sum"] = before
        return tensor

    vars(collectives)["all_reduce_sum"] = skip


def _to_a_worker(number: int) -> Callable[[FaultInjector, Fault], None]:
    def send(injector: FaultInjector, fault: Fault) -> None:
        workers = _data_workers()
        if not workers:
            raise RuntimeError(f"{fault}: this rank has no data workers; set data.workers=1")
        os.kill(workers[0], number)

    return send


def _data_workers() -> list[int]:
    """Children of this process that lead a group of their own, as data workers do."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            process, _, rest = path.read_text().partition(" (")
            _, parent, group = rest.rpartition(")")[2].split()[:3]
            if int(parent) == os.getpid() and group == process:
                found.append(int(process))
    return sorted(found)


def _fill_disk(injector: FaultInjector, fault: Fault) -> None:
    """fsync is where a file system that allocates late says so."""
    before, left = os.fsync, [int(fault.value)]

    def full(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if left[0] > 0 and f"{os.sep}checkpoints{os.sep}" in path:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        before(descriptor)

    vars(os)["fsync"] = full


def _block_disk(injector: FaultInjector, fault: Fault) -> None:
    """As a hard-mounted network disk whose server is away: no answer, not even an error."""
    until, folder = time.monotonic() + fault.value, f"{injector.output_dir.resolve()}{os.sep}"
    append, fsync = files.append_whole, os.fsync

    def wait(descriptor: int) -> None:
        if f"{os.readlink(f'/proc/self/fd/{descriptor}')}{os.sep}".startswith(folder):
            time.sleep(max(0.0, until - time.monotonic()))

    def append_late(file: io.FileIO, data: bytes) -> None:
        wait(file.fileno())
        append(file, data)

    def sync_late(descriptor: int) -> None:
        wait(descriptor)
        fsync(descriptor)

    _replace_append(append_late)
    vars(os)["fsync"] = sync_late


def _replace_append(append: Callable[[io.FileIO, bytes], None]) -> None:
    for module in (files, writers):
        vars(module)["append_whole"] = append


def _fill_log(injector: FaultInjector, fault: Fault) -> None:
    append, left = files.append_whole, [int(fault.value)]

    def full(file: io.FileIO, data: bytes) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        append(file, data)

    _replace_append(full)


def _end_terminal(injector: FaultInjector, fault: Fault) -> None:
    write = os.write

    def fail(descriptor: int, data: Any) -> int:
        if descriptor in (1, 2):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(descriptor, data)

    vars(os)["write"] = fail


def _block_terminal(injector: FaultInjector, fault: Fault) -> None:
    until, write = time.monotonic() + fault.value, os.write

    def write_late(descriptor: int, data: Any) -> int:
        if descriptor in (1, 2):
            time.sleep(max(0.0, until - time.monotonic()))
        return write(descriptor, data)

    vars(os)["write"] = write_late


ACTIONS: dict[str, Callable[[FaultInjector, Fault], None]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "segv": _read_nothing,
    "abort": lambda injector, fault: os.abort(),
    "term": _signal(signal.SIGTERM),
    "exception": _raise,
    "exit0": _exit,
    "hang": _hang,
    "hang-gil": _hang_with_lock,
    "slow": FaultInjector.slow,
    "clock": lambda injector, fault: clock.move(fault.value),
    "nan": FaultInjector.nan,
    "oom": FaultInjector.oom,
    "flip": FaultInjector.flip,
    "skip-collective": _skip_sum,
    "poison": FaultInjector.poison,
    "loader-kill": _to_a_worker(signal.SIGKILL),
    "loader-hang": _to_a_worker(signal.SIGSTOP),
    "disk-full": _fill_disk,
    "disk-blocks": _block_disk,
    "log-full": _fill_log,
    "terminal-error": _end_terminal,
    "terminal-blocks": _block_terminal,
    "storage-error": FaultInjector.storage,
    "storage-blocks": FaultInjector.storage,
    "slow-stat": lambda injector, fault: None,  # since the start
    "eval-error": FaultInjector.eval_error,
}
