"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, SwanLab.

    TrackerProcess   a MetricWriter that hands everything to one of the others in its own process
    TRACKERS         the others, by `log.trackers.name`

A tracker's library patches what it finds, starts threads and waits for networks.  So each tracker
has a process of its own, of rank 0 alone: whatever it does there, a step waits for none of it, and
a signal or a fork of the run does not meet it.  What cannot be handed over is dropped, with one
warning; the run continues.
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

_MOST_BYTES = 1 << 26  # that wait for a tracker; some hundred images
_HUNG_SECONDS = 300.0  # without a read after which a tracker counts as blocked
_CLOSE_SECONDS = 60.0  # for the rest at the end of a run
_STOPPED_SECONDS = 5.0  # the same, where a signal ends the run: who sent it waits some 30
_LAST_WORDS_SECONDS = 1.0
_PROJECT = "ppdist"  # in which runs are shown, unless the tracker's own variable says another
_ERROR_FILE, _LOG_FILE, _ID_FILE = "error.txt", "log.txt", "run.json"


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker's writer gets of the run.

    Attributes:
        config: its section of `log.trackers`.
        folder: output_dir/trackers/NAME, its own; it exists.
        name: how the run is called.
        resume_step: the step that this run continues from; None: a new run.
    """

    config: Any
    folder: Path
    name: str
    resume_step: int | None

    def remembered_id(self) -> str | None:
        """The tracker's id of a resumed run; None: a new run."""
        if self.resume_step is None:
            return None
        try:
            return str(json.loads(text_of(self.folder / _ID_FILE))["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember_id(self, identity: str) -> None:
        """For a start of this run that resumes it."""
        replace_file(self.folder / _ID_FILE, json.dumps({"id": identity}).encode())


class TrackerProcess(MetricWriter):
    """Passes data to a tracker's writer in another process without waiting.

    Only `close` waits.  Each call raises RuntimeError once if the tracker has failed or hangs:
    after that nothing is passed to it any more.
    """

    def __init__(self, target: str, run: TrackedRun) -> None:
        """Starts the process.

        Args: target: `package.module:Class`, called there as `Class(run)`.
        Raises: OSError: its folder cannot be made, or there is no process for it.
        """
        for folder in (run.folder.parent, run.folder):
            require_no_link(folder)
        run.folder.mkdir(parents=True, exist_ok=True)
        self._folder = run.folder
        (run.folder / _ERROR_FILE).unlink(missing_ok=True)
        # For Pythons that the library starts: none looks into the current folder, from 3.11 on.
        paths = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}
        # No `python_module`: there this module would be another one, with classes of its own.
        command = python("from ppdist.common.trackers import main; main()")
        with open_own(run.folder / _LOG_FILE, "ab") as output:
            # Not tied to this process: it writes what it has when its input ends.
            self.process = start(
                command, stdin=PIPE, stdout=output, stderr=output, env=environment, ends_by=0
            )
        self._latest = math.inf  # when to be closed, by time.monotonic()
        self._closes: float | None = None  # when it was asked to
        self._off = False
        self._pipe = WriterThread()
        self._taken = time.monotonic()  # when the process last took something
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

        Until `seconds` from now or a few seconds from its call, whichever is later.
        """
        self._latest = time.monotonic() + seconds

    def end(self) -> None:
        if not self._off and self._closes is None:
            self._put(("close", ()))
            self._closes = time.monotonic()

    def close(self) -> None:
        """Waits until all is written, for a minute at most since `end`."""
        self.end()
        if self._off or self._closes is None:
            return
        self._off = True
        limited = max(self._latest, self._closes + _STOPPED_SECONDS)
        last = min(self._closes + _CLOSE_SECONDS, limited)
        try:
            code = self.process.wait(max(0.0, last - time.monotonic()))
        except TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(
                f"it did not finish within {last - self._closes:.2g} s of the end and was "
                f"stopped; see {self._folder / _LOG_FILE}"
            ) from None
        if code:
            raise RuntimeError(self._why())

    def _put(self, message: tuple[Any, ...]) -> None:
        if self._off:
            return
        trouble = ""
        if self.process.poll() is not None:
            trouble = self._why()
        elif self._pipe.waiting_bytes > _MOST_BYTES or (
            self._pipe.waiting and time.monotonic() - self._taken > _HUNG_SECONDS
        ):
            trouble = f"it is blocked; see {self._folder / _LOG_FILE}"
        if trouble:
            self._off = True
            self.process.kill()
            self.process.wait()
            raise RuntimeError(trouble)
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if not self._pipe.waiting:
            self._taken = time.monotonic()
        self._pipe.put("tracker", partial(self._send, data), len(data))

    def _send(self, data: bytes) -> None:
        """Sends data in a thread, so that the run need not wait.

        It fails where the process has ended, which `_put` sees.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()
        self._taken = time.monotonic()

    def _why(self) -> str:
        """Why the process has ended."""
        try:
            return (self._folder / _ERROR_FILE).read_text(encoding="utf-8")
        except OSError:
            return (
                f"its process ended with code {self.process.returncode}; see "
                f"{self._folder / _LOG_FILE}"
            )


def main() -> None:
    """The process of one tracker: reads messages from stdin, calls its writer."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run says when it ends
        signal.signal(number, signal.SIG_IGN)
    messages = sys.stdin.buffer
    target, run = pickle.load(messages)
    with _masked_output():
        _serve(messages, target, run)


def _serve(messages: Any, target: str, run: TrackedRun) -> None:
    try:
        module, _, name = target.partition(":")
        kind: Any = reduce(getattr, name.split("."), importlib.import_module(module))
        writer = kind(run)
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
        why = without_secrets(f"{type(error).__name__}: {error}")
        replace_file(run.folder / _ERROR_FILE, why.encode())
        sys.exit(1)


_SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SHORTEST_SECRET = 6  # characters; what is shorter would mask ordinary words
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")


def without_secrets(text: str) -> str:
    """Masks logins in addresses and values of secret environment variables.

    Those are variables whose names suggest secrets.
    """
    text = _LOGIN.sub("***@", text)
    found = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    for value in sorted(found, key=len, reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text


@contextmanager
def _masked_output() -> Iterator[None]:
    """Masks secrets in all output of this process inside the block.

    Native output, too; it goes to the process's stdout.
    """
    log, (ours, theirs) = os.dup(1), os.pipe()
    for number in (1, 2):
        os.dup2(theirs, number)
    os.close(theirs)

    def copy() -> None:
        with open(ours, "rb") as lines:
            for line in lines:
                masked = without_secrets(os.fsdecode(line))
                with suppress(OSError):  # a full disk: who prints must not wait for it
                    os.write(log, os.fsencode(masked))

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number in (1, 2):
            os.dup2(log, number)
        thread.join(_LAST_WORDS_SECONDS)  # a child of it may keep its end open


def require_tracker(name: str) -> None:
    """Raises: ConfigError: the package of one of TRACKERS is not installed."""
    package = "tensorboardX" if name == "tensorboard" else name
    if name in TRACKERS and find_spec(package) is None:
        raise ConfigError(
            f"log.trackers needs the package {package}, which is not installed",
            code="package_missing",
            where=f"{name}",
            fix=f"pip install 'ppdist[{name}]', or leave it out",
        )


class TensorBoardWriter(MetricWriter):
    """TensorBoard, by tensorboardX.

    Where a run is resumed or rolled back a new file begins, which says from which step on earlier
    points do not count; TensorBoard hides them.
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
        made = summary.hparams(dict(hyper_parameters), dict.fromkeys(metrics, 0.0))
        for part in made[:2]:
            self._writer.file_writer.add_summary(part, 0)
        for name, text in texts.items():  # indented by four it is taken as it is, not as Markdown
            self._writer.add_text(f"config/{name}", f"    {text}", 0)

    def close(self) -> None:
        self._writer.close()


class WandbWriter(MetricWriter):
    """Weights & Biases.

    Its own step only grows, and a run that rolls back makes steps again; so the step is a value of
    its own, `step`, over which all others are drawn.  Resuming continues the same run.
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
        self._run.log({"step": step, tag: [self._wandb.Image(each) for each in images_HW3]})

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        chosen = {**hyper_parameters, "config": dict(texts)}
        self._run.config.update(chosen, allow_val_change=True)

    def close(self) -> None:
        self._run.finish()


class MLflowWriter(MetricWriter):
    """MLflow through its client, without global state; resuming continues the run."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric, self._param = Metric, Param
        where = os.environ.get("MLFLOW_TRACKING_URI")
        if not where:
            where = (run.folder / "mlruns").resolve().as_uri()
            # MLflow 3.7 and later want to be asked before they write to a folder.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = mlflow.MlflowClient(tracking_uri=where)
        identity = run.remembered_id()
        if identity is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
            found = self._client.get_experiment_by_name(name)
            experiment = (
                self._client.create_experiment(name) if found is None else found.experiment_id
            )
            identity = self._client.create_run(experiment, run_name=run.name).info.run_id
            run.remember_id(identity)
        else:
            self._client.set_terminated(identity, "RUNNING")
        self._id = identity

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = round(1000 * time.time())
        metrics = [self._metric(_plain(tag), value, now, step) for tag, value in values.items()]
        for begin in range(0, len(metrics), 1000):  # a server takes no more at once
            self._client.log_batch(self._id, metrics=metrics[begin : begin + 1000])

    def add_images(self, step: int, tag: str, images_HW3: list[np.ndarray]) -> None:
        for number, image_HW3 in enumerate(images_HW3):
            self._client.log_image(self._id, image_HW3, key=_plain(f"{tag}/{number}"), step=step)

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        # A parameter keeps its first value; a resumed run may have others, so they are tags, too.
        known = self._client.get_run(self._id).data.params
        fresh = {key: value for key, value in hyper_parameters.items() if key not in known}
        self._client.log_batch(
            self._id, params=[self._param(key, str(value)) for key, value in fresh.items()]
        )
        for key, value in {**hyper_parameters, **texts}.items():
            self._client.set_tag(self._id, f"ppdist.{key}", str(value)[:5000])

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanLabWriter(MetricWriter):
    """SwanLab.  Resuming continues the same run online; offline it begins another one."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._swanlab = swanlab
        offline = os.environ.get("SWANLAB_MODE") in ("offline", "local")
        identity = None if offline else run.remembered_id()
        begun = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", _PROJECT),
            name=run.name,
            log_dir=str(run.folder),
            **({"id": identity, "resume": "allow"} if identity else {}),
        )
        run.remember_id(str(begun.id))

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._swanlab.log(dict(values), step=step)

    def add_images(self, step: int, tag: str, images_HW3: list[np.ndarray]) -> None:
        self._swanlab.log({tag: [self._swanlab.Image(each) for each in images_HW3]}, step=step)

    def describe(
        self, hyper_parameters: Mapping[str, Any], metrics: list[str], texts: Mapping[str, str]
    ) -> None:
        self._swanlab.config.update({**hyper_parameters, "config": dict(texts)})

    def close(self) -> None:
        self._swanlab.finish()


def _plain(tag: str) -> str:
    """A tag of the characters that MLflow takes."""
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
