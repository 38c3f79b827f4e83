"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, SwanLab.

    TrackerProcess   a MetricWriter that passes everything to a tracker's writer in another process
    TRACKERS         the writers of trackers, by `log.trackers.name`

A tracker's library patches modules, starts threads and waits for networks.  So each tracker has a
process of its own, beside rank 0 alone: no step waits for it, and signals and forks of the run do
not reach it.  Data that cannot be passed on are dropped, with one warning; the run continues.
"""

import importlib
import json
import math
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ppdist.common.child import PIPE, TimeoutExpired, python, start
from ppdist.common.errors import ConfigError
from ppdist.common.files import open_own, replace_file, require_no_link, text_of
from ppdist.common.writers import MetricWriter
from ppdist.runtime.writer_thread import WriterThread

_MOST_BYTES = 1 << 26  # bytes that wait for a tracker; some hundred images
_HUNG_SECONDS = 300.0  # a tracker that reads nothing for this long counts as blocked
_CLOSE_SECONDS = 60.0  # to write the rest at the end of a run
_STOPPED_SECONDS = 5.0  # the same after a signal, whose sender waits some 30 s
_LAST_WORDS_SECONDS = 1.0
_PROJECT = "ppdist"  # in which runs are shown, unless the tracker's own variable sets another
_ERROR_FILE, _LOG_FILE, _ID_FILE = "error.txt", "log.txt", "run.json"


@dataclass(frozen=True)
class TrackedRun:
    """The run as a tracker's writer sees it.

    Attributes:
        config: the tracker's section of `log.trackers`.
        folder: output_dir/trackers/NAME, of this tracker alone; it exists.
        name: name of the run.
        resume_step: the step that this run continues from; None: a new run.
    """

    config: Any
    folder: Path
    name: str
    resume_step: int | None

    def remembered_id(self) -> str | None:
        """Reads the id that the tracker gave to a resumed run; None for a new run."""
        if self.resume_step is None:
            return None
        try:
            return str(json.loads(text_of(self.folder / _ID_FILE))["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember_id(self, identity: str) -> None:
        """Stores the tracker's id of this run, for when it is resumed."""
        replace_file(self.folder / _ID_FILE, json.dumps({"id": identity}).encode())


class TrackerProcess(MetricWriter):
    """A writer that passes data to a tracker's writer in another process, without waiting.

    Only `close` waits.  Each call raises RuntimeError once if the tracker has failed or hangs:
    after that nothing is passed to it any more.
    """

    def __init__(self, target: str, run: TrackedRun) -> None:
        """Starts the process.

        Args: target: `package.module:Class`, called there as `Class(run)`.
        Raises: OSError: its folder cannot be created, or the process cannot be started.
        """
        for folder in (run.folder.parent, run.folder):
            require_no_link(folder)
        run.folder.mkdir(parents=True, exist_ok=True)
        self._folder = run.folder
        (run.folder / _ERROR_FILE).unlink(missing_ok=True)
        # For Python processes that the library starts: from 3.11 on, they skip the current folder.
        paths = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        # Not `python_module`: classes of a module that runs as `__main__` cannot be unpickled here.
        command = python("from ppdist.common.trackers import main; main()")
        with open_own(run.folder / _LOG_FILE, "ab") as output:
            # It does not end with this process: it writes what it has when its input ends.
            self.process = start(
                command, stdin=PIPE, stdout=output, stderr=output, env=environment, ends_by=0
            )
        self._close_deadline = math.inf  # by time.monotonic()
        self._end_called_at: float | None = None  # by time.monotonic()
        self._is_off = False
        self._pipe = WriterThread()
        self._last_read_at = time.monotonic()  # when the process last read
        self._put((target, run))

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        if values:
            self._put(("add_scalars", (step, dict(values))))

    def add_images(self, step: int, tag: str, images_HW3: list[np.ndarray]) -> None:
        self._put(("add_images", (step, tag, images_HW3)))

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        self._put(("describe", (dict(hyper_parameters), metrics, dict(texts))))

    def rollback(self, step: int) -> None:
        self._put(("rollback", (step,)))

    def limit_close(self, seconds: float = 0.0) -> None:
        """Limits how long `close` waits.

        The limit is `seconds` from now or a few seconds after `end`, whichever is later.
        """
        self._close_deadline = time.monotonic() + seconds

    def end(self) -> None:
        if not self._is_off and self._end_called_at is None:
            self._put(("close", ()))
            self._end_called_at = time.monotonic()

    def close(self) -> None:
        """Waits until everything is written, at most a minute from the call of `end`."""
        self.end()
        if self._is_off or self._end_called_at is None:
            return
        self._is_off = True
        close_limit = max(self._close_deadline, self._end_called_at + _STOPPED_SECONDS)
        deadline = min(self._end_called_at + _CLOSE_SECONDS, close_limit)
        try:
            code = self.process.wait(max(0.0, deadline - time.monotonic()))
        except TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(
                f"it did not finish within {deadline - self._end_called_at:.2g} s of the end and "
                f"was stopped; see {self._folder / _LOG_FILE}"
            ) from None
        if code:
            raise RuntimeError(self._explain_end())

    def _put(self, message: tuple[Any, ...]) -> None:
        if self._is_off:
            return
        problem = ""
        if self.process.poll() is not None:
            problem = self._explain_end()
        elif self._pipe.waiting_bytes > _MOST_BYTES or (
            self._pipe.waiting and time.monotonic() - self._last_read_at > _HUNG_SECONDS
        ):
            problem = f"it is blocked; see {self._folder / _LOG_FILE}"
        if problem:
            self._is_off = True
            self.process.kill()
            self.process.wait()
            raise RuntimeError(problem)
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if not self._pipe.waiting:
            self._last_read_at = time.monotonic()
        self._pipe.put("tracker", partial(self._send, data), len(data))

    def _send(self, data: bytes) -> None:
        """Sends data, in a thread, so that the run need not wait.

        It fails if the process has ended, which the next `_put` reports.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()
        self._last_read_at = time.monotonic()

    def _explain_end(self) -> str:
        """Returns the reason why the process has ended."""
        try:
            return (self._folder / _ERROR_FILE).read_text(encoding="utf-8")
        except OSError:
            return (
                f"its process ended with code {self.process.returncode}; see "
                f"{self._folder / _LOG_FILE}"
            )


def main() -> None:
    """Runs the process of one tracker: reads messages from stdin, calls its writer."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The run itself tells this process when to end; Ctrl-C reaches all processes of the terminal.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    messages = sys.stdin.buffer
    target, run = pickle.load(messages)
    with _masked_output():
        _serve(messages, target, run)


def _serve(messages: Any, target: str, run: TrackedRun) -> None:
    try:
        module, _, name = target.partition(":")
        writer_class: Any = reduce(getattr, name.split("."), importlib.import_module(module))
        writer = writer_class(run)
        method = ""
        while method != "close":
            try:
                method, arguments = pickle.load(messages)
            except (EOFError, pickle.UnpicklingError):  # the run was killed
                method, arguments = "close", ()
            if method == "close":
                signal.alarm(round(_CLOSE_SECONDS))
            getattr(writer, method)(*arguments)
    except Exception as error:
        traceback.print_exc()
        reason = without_secrets(f"{type(error).__name__}: {error}")
        replace_file(run.folder / _ERROR_FILE, reason.encode())
        sys.exit(1)


_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 6  # characters; shorter values would mask ordinary words
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")


def without_secrets(text: str) -> str:
    """Masks logins in addresses and values of environment variables whose names suggest secrets."""
    text = _LOGIN.sub("***@", text)
    secrets = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text


@contextmanager
def _masked_output() -> Iterator[None]:
    """Masks secrets, inside the block, in this process's output, native code's included.

    All output goes to the process's stdout.
    """
    log, (read_end, write_end) = os.dup(1), os.pipe()
    for number in (1, 2):
        os.dup2(write_end, number)
    os.close(write_end)

    def copy_masked() -> None:
        with open(read_end, "rb") as lines:
            for line in lines:
                masked = without_secrets(os.fsdecode(line))
                with suppress(OSError):
                    # A full disk must not block the threads that print into the pipe.
                    os.write(log, os.fsencode(masked))

    thread = threading.Thread(target=copy_masked, daemon=True)
    thread.start()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            os.dup2(log, number)
        # A child process may keep the pipe open forever.
        thread.join(_LAST_WORDS_SECONDS)


def require_tracker(name: str) -> None:
    """Checks that the package of a tracker is installed.

    Raises: ConfigError `package_missing`.
    """
    package = "tensorboardX" if name == "tensorboard" else name
    if name in TRACKERS and find_spec(package) is None:
        raise ConfigError(
            f"log.trackers needs the package {package}, which is not installed",
            code="package_missing",
            where=f"{name}",
            fix=f"pip install 'ppdist[{name}]', or leave it out",
        )


class TensorBoardWriter(MetricWriter):
    """A writer for TensorBoard that uses tensorboardX.

    A resumed or rolled back run begins a new file, which says from which step on earlier points do
    not count; TensorBoard hides them.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.folder
        self._open(run.resume_step)

    def _open(self, last_step: int | None) -> None:
        from tensorboardX import SummaryWriter

        first = None if last_step is None else last_step + 1
        self._writer: Any = SummaryWriter(
            str(self._folder), purge_step=first, flush_secs=10, filename_suffix=f".{first or 0}"
        )

    def rollback(self, step: int) -> None:
        self._writer.close()
        self._open(step)

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def add_images(self, step: int, tag: str, images_HW3: list[np.ndarray]) -> None:
        for number, image_HW3 in enumerate(images_HW3):
            self._writer.add_image(f"{tag}/{number}", image_HW3, step, dataformats="HWC")

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        from tensorboardX import summary

        # `add_hparams` would begin another run; its third part would mark this one as ended.
        summaries = summary.hparams(dict(hyper_parameters), dict.fromkeys(metrics, 0.0))
        for part_summary in summaries[:2]:
            self._writer.file_writer.add_summary(part_summary, 0)
        # Indented by four spaces the text is not taken for Markdown.
        for name, text in texts.items():
            self._writer.add_text(f"config/{name}", f"    {text}", 0)

    def close(self) -> None:
        self._writer.close()


class WandbWriter(MetricWriter):
    """A writer for Weights & Biases.

    Its own step only grows, and a run that rolls back repeats steps; so the step is a separate
    value, `step`, over which all others are drawn.  Resuming continues the same run.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=run.name,
            id=run.remembered_id(),
            resume="allow",
            dir=str(run.folder),
            settings=wandb.Settings(console="off"),
        )
        run.remember_id(self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def add_images(self, step: int, tag: str, images_HW3: list[np.ndarray]) -> None:
        self._run.log(
            {"step": step, tag: [self._wandb.Image(image_HW3) for image_HW3 in images_HW3]}
        )

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        chosen = {**hyper_parameters, "config": dict(texts)}
        self._run.config.update(chosen, allow_val_change=True)

    def close(self) -> None:
        self._run.finish()


class MLflowWriter(MetricWriter):
    """A writer for MLflow, by its client, without global state; resuming continues the run."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric, self._param = Metric, Param
        address = os.environ.get("MLFLOW_TRACKING_URI")
        if not address:
            address = (run.folder / "mlruns").resolve().as_uri()
            # MLflow 3.7 and later write to a folder only with this.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = mlflow.MlflowClient(tracking_uri=address)
        identity = run.remembered_id()
        if identity is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
            experiment_entry = self._client.get_experiment_by_name(name)
            experiment = (
                self._client.create_experiment(name)
                if experiment_entry is None
                else experiment_entry.experiment_id
            )
            identity = self._client.create_run(experiment, run_name=run.name).info.run_id
            run.remember_id(identity)
        else:
            self._client.set_terminated(identity, "RUNNING")
        self._id = identity

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        metrics = [
            self._metric(_to_mlflow_key(tag), value, now, step) for tag, value in values.items()
        ]
        # A server accepts no more at once.
        for begin in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + 1000])

    def add_images(self, step: int, tag: str, images_HW3: list[np.ndarray]) -> None:
        for number, image_HW3 in enumerate(images_HW3):
            self._client.log_image(
                self._id, image_HW3, key=_to_mlflow_key(f"{tag}/{number}"), step=step
            )

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        # A parameter keeps its first value; a resumed run may have others, so all are tags as well.
        stored = self._client.get_run(self._id).data.params
        fresh = {key: value for key, value in hyper_parameters.items() if key not in stored}
        self._client.log_batch(
            self._id, params=[self._param(key, str(value)) for key, value in fresh.items()]
        )
        for key, value in {**hyper_parameters, **texts}.items():
            self._client.set_tag(self._id, f"ppdist.{key}", str(value)[:5000])

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanLabWriter(MetricWriter):
    """A writer for SwanLab; resuming continues the run online, offline it begins another one."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._swanlab = swanlab
        offline = os.environ.get("SWANLAB_MODE") in ("offline", "local")
        identity = None if offline else run.remembered_id()
        run_handle = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", _PROJECT),
            name=run.name,
            log_dir=str(run.folder),
            **({"id": identity, "resume": "allow"} if identity else {}),
        )
        run.remember_id(str(run_handle.id))

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._swanlab.log(dict(values), step=step)

    def add_images(self, step: int, tag: str, images_HW3: list[np.ndarray]) -> None:
        self._swanlab.log(
            {tag: [self._swanlab.Image(image_HW3) for image_HW3 in images_HW3]}, step=step
        )

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        self._swanlab.config.update({**hyper_parameters, "config": dict(texts)})

    def close(self) -> None:
        self._swanlab.finish()


def _to_mlflow_key(tag: str) -> str:
    """Replaces the characters of a tag that MLflow refuses."""
    return re.sub(r"[^\w\-. /]", "_", tag)


TRACKERS = {
    name: f"{WandbWriter.__module__}:{writer.__name__}"
    for name, writer in {
        "tensorboard": TensorBoardWriter,
        "wandb": WandbWriter,
        "mlflow": MLflowWriter,
        "swanlab": SwanLabWriter,
    }.items()
}
