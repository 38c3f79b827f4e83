"""Metrics of a run on this host for Prometheus: `fleetrun --metrics_port 9410`.

All numbers are read at each scrape: from the heartbeat of each rank, from the files that the
attempts of the job left in fleetrun's private folder, and on rank 0's host from the files of the
run.  No rank takes part, so no scrape can delay one.  docs/monitoring.md explains each number.

A separate process, which fleetrun starts and ends, answers the scrapes.  It only reads, so neither
a port that is taken nor a package that is missing reaches the job.  It lives as long as fleetrun:
restarts of the ranks are numbers to it.  Cards are measured by dcgm-exporter.
"""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ppdist.common import child
from ppdist.common.machine import is_alive
from ppdist.common.signals import STOP_SIGNALS
from ppdist.distributed import heartbeat
from ppdist.launch import worker
from ppdist.launch.console import finish, say

# Name -> description.  Metrics whose names end with _total only grow, as long as the ranks live;
# those whose names begin with ppdist_run_ describe the whole run.  Only rank 0's host exports
# these, except for the number of ranks, which each host exports: it has to outlive the loss of any
# host.
METRICS = {
    "ppdist_run_ranks": "Ranks of the run, on all hosts.",
    "ppdist_run_step": "Optimizer steps done.",
    "ppdist_run_planned_steps": "Optimizer steps of the whole run.",
    "ppdist_run_images_total": "Images trained on, by all ranks.",
    "ppdist_run_loss": "Loss of the last step, of all ranks.",
    "ppdist_run_bad_steps_total": "Steps not applied because something was not finite.",
    "ppdist_run_checkpoint_step": "Step of the newest checkpoint on disk.",
    "ppdist_run_checkpoint_age_seconds": "For how long this attempt has saved nothing.",
    "ppdist_run_evaluation": "What the last evaluation said, by metric.",
    "ppdist_run_evaluation_step": "The step it followed.",
    "ppdist_host_ranks": "Ranks that this host should have.",
    "ppdist_host_restarts_total": "How often the job was started again.",
    "ppdist_host_stalls_total": "How often fleetrun ended ranks that made no progress.",
    "ppdist_rank_up": "1 while the process of the rank lives.",
    "ppdist_rank_step": "Optimizer steps done, as this rank says.",
    "ppdist_rank_lag_steps": "Steps behind the rank of this host that leads.",
    "ppdist_rank_silent_seconds": "Since the last sign of life.",
    "ppdist_rank_waiting": "1 while the rank waits for others in a collective.",
    "ppdist_rank_phase": "1 for what the rank does: start, step, evaluate, save or end.",
    "ppdist_rank_steps_total": "Steps made by this process; the seconds below are of these.",
    "ppdist_rank_micro_batches_total": "Of these steps; of one that is spread, an even share is 1.",
    "ppdist_rank_step_seconds_total": "Wall time of steps.",
    "ppdist_rank_own_seconds_total": "Of it, without waiting for other ranks.",
    "ppdist_rank_data_seconds_total": "Of its own, waiting for images.",
}
# Exported from an evaluation; metrics of single classes would each add a series.
EVALUATED = (
    "mAP", "mAP50", "mAP75", "fitness", "precision", "recall", "f1", "top1", "top5", "val_loss",
)  # fmt: skip
_TAIL_BYTES = 4 << 20  # read from the end of a metrics.jsonl: some ten thousand steps
_CHECKPOINT, _MANIFEST = re.compile(r"step-(\d+)"), "manifest.json"
_CLIENT_SECONDS = 10.0  # in which a client has to send its request and read the response
_LOOK_SECONDS = 1.0
_END_SECONDS = 5.0

Sample = tuple[str, dict[str, str], float]  # name, labels, value


class Measures:
    """The measurements of one host's ranks, over all attempts of a job."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """Stores the arguments; reads nothing yet.

        Args:
            folder: fleetrun's private folder; each attempt has a folder in it, named by its number.
            say: prints a line about a source that cannot be read, once for each kind.
        """
        self._folder, self._say = folder, say
        self._run: dict[str, Any] = {}  # as written by heartbeat.tell_run
        self._evaluation: dict[str, Any] = {}  # the last evaluation that was seen
        self._reported: set[str] = set()

    def samples(self) -> list[Sample]:
        """Reads all numbers that are readable now; warns once about the others."""
        attempt = max((int(path.name) for path in self._folder.glob("[0-9]*")), default=0)
        folder = self._folder / str(attempt)
        with self._report_once("run"):
            for path in sorted(folder.glob("run-*.json"))[:1]:
                run = json.loads(path.read_text(encoding="utf-8"))
                self._run = {"output_dir": str(run["output_dir"]), "world": int(run["world"])}
        labels = {"run": Path(self._run.get("output_dir", "")).name, "host": socket.gethostname()}
        samples: list[Sample] = []
        for read in (self._read_run, self._read_host, self._read_ranks):
            with self._report_once(read.__name__):
                for name, extra, value in read(folder):
                    samples.append((name, labels | extra, value))
        return samples

    @contextmanager
    def _report_once(self, part: str) -> Iterator[None]:
        """Reports the first failure to read a part; the other parts are read nevertheless."""
        try:
            yield
        except Exception as error:
            if part not in self._reported:
                self._reported.add(part)
                self._say(f"some numbers cannot be read: {error!r}")

    def _read_host(self, folder: Path) -> Iterator[Sample]:
        """Yields the numbers of this host."""
        yield "ppdist_host_restarts_total", {}, float(folder.name)
        stalls = len(list(self._folder.glob("[0-9]*/watch.json")))
        yield "ppdist_host_stalls_total", {}, float(stalls)
        job_file = folder / "job.json"
        job = json.loads(job_file.read_text(encoding="utf-8")) if job_file.is_file() else {}
        yield "ppdist_host_ranks", {}, float(job.get("processes", 0))
        if self._run:
            yield "ppdist_run_ranks", {}, float(self._run["world"])

    def _read_ranks(self, folder: Path) -> Iterator[Sample]:
        """Yields the numbers of each rank of this host."""
        is_up = {
            report.rank: report.code is None and report.child != 0 and is_alive(report.child)
            for report in worker.read_reports(folder)
        }
        readings = {
            rank: reading
            for rank in is_up
            if is_up[rank]
            and (reading := heartbeat.read(heartbeat.heartbeat_path(folder, rank))) is not None
        }
        furthest = max((reading.step for reading in readings.values()), default=0)
        for rank in is_up:
            labels = {"rank": str(rank)}
            yield "ppdist_rank_up", labels, float(is_up[rank])
            if rank not in readings:
                continue
            reading = readings[rank]
            silent = max(0.0, time.monotonic() - reading.seconds)
            yield "ppdist_rank_silent_seconds", labels, silent
            yield "ppdist_rank_waiting", labels, float(reading.inside)
            for phase in heartbeat.PHASES:
                yield "ppdist_rank_phase", {**labels, "phase": phase}, float(phase == reading.phase)
            # During its start a rank does not know yet from which step the run resumes.
            if reading.phase != "start":
                yield "ppdist_rank_step", labels, float(reading.step)
                yield "ppdist_rank_lag_steps", labels, float(furthest - reading.step)
            work = heartbeat.read_work(heartbeat.heartbeat_path(folder, rank))
            if work is not None:
                yield "ppdist_rank_steps_total", labels, float(work.steps)
                yield "ppdist_rank_micro_batches_total", labels, work.micro_batches
                yield "ppdist_rank_step_seconds_total", labels, work.step_seconds
                yield "ppdist_rank_own_seconds_total", labels, work.own_seconds
                yield "ppdist_rank_data_seconds_total", labels, work.data_seconds

    def _read_run(self, folder: Path) -> Iterator[Sample]:
        """Yields the numbers of the whole run; none except on rank 0's host."""
        path = heartbeat.heartbeat_path(folder, 0)
        if not path.exists():
            return
        reading, work = heartbeat.read(path), heartbeat.read_work(path)
        # During its start a rank does not know yet from which step the run resumes.
        if reading is not None and reading.phase != "start":
            yield "ppdist_run_step", {}, float(reading.step)
        if work is not None:
            yield "ppdist_run_planned_steps", {}, float(work.planned_steps)
            yield "ppdist_run_images_total", {}, float(work.images)
            yield "ppdist_run_bad_steps_total", {}, float(work.bad_steps)
            if work.steps:
                yield "ppdist_run_loss", {}, work.loss
        if not self._run:
            return
        output_dir = Path(self._run["output_dir"])
        saved = newest_checkpoint(output_dir / "checkpoints")
        if saved is not None:
            yield "ppdist_run_checkpoint_step", {}, float(saved[0])
        # A failure loses at most the progress made since this attempt began.
        began = (folder / "job.json").stat().st_mtime
        since = began if saved is None else max(began, saved[1])
        yield "ppdist_run_checkpoint_age_seconds", {}, max(0.0, time.time() - since)
        last = self._evaluation = last_evaluation(output_dir / "metrics.jsonl") or self._evaluation
        for name in EVALUATED:
            if isinstance(last.get(name), float | int):
                yield "ppdist_run_evaluation", {"metric": name}, float(last[name])
        if last:
            yield "ppdist_run_evaluation_step", {}, float(last["step"])


def newest_checkpoint(folder: Path) -> tuple[int, float] | None:
    """Finds the newest checkpoint; returns its step and mtime, or None."""
    manifests = []
    for path in folder.glob(f"step-*/{_MANIFEST}"):
        step = _CHECKPOINT.fullmatch(path.parent.name)
        if step is not None:
            manifests.append((int(step[1]), path))
    for number, path in sorted(manifests, reverse=True):
        try:
            return number, path.stat().st_mtime
        except FileNotFoundError:
            # The checkpoint has just been pruned.
            continue
    return None


def last_evaluation(path: Path) -> dict[str, Any]:
    """Reads the last evaluation near the end of a metrics.jsonl, or {}."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines()
    except FileNotFoundError:
        return {}
    for line in reversed(lines):
        if b'"eval_seconds"' in line:
            # The line is still being written, or was cut short by a crash.
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    return record
    return {}


@contextmanager
def export_metrics(folder: Path, endpoint: tuple[str, int] | None) -> Iterator[None]:
    """Serves Prometheus metrics while the block runs; warns once if that fails.

    Args:
        folder: fleetrun's private folder.
        endpoint: address and port to serve at; None: nothing is served.
    """
    if endpoint is None:
        yield
        return
    command = child.python_module("ppdist.launch.metrics", str(folder), *map(str, endpoint))
    process = None
    try:
        process = child.start(command, stdout=child.DISCARD)
    except OSError as error:
        _give_up(f"no process could be started ({error})")
    try:
        yield
    finally:
        if process is not None:
            process.kill()
            # A process that waits for an unreachable disk may not end.
            with suppress(child.TimeoutExpired):
                process.wait(_END_SECONDS)


def main(arguments: Sequence[str]) -> int:
    """Serves until its parent, fleetrun, is gone.

    Args: arguments: folder, address and port, as in `export_metrics`.
    """
    folder, address, port = Path(arguments[0]), arguments[1], int(arguments[2])
    # Schedulers signal all processes of a job, but the job may go on nevertheless.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    try:
        server = open_server(address, port, Measures(folder, _say))
    except (ImportError, OSError, OverflowError) as error:
        reason = f"{address}:{port} cannot be opened ({error}): choose another one"
        if isinstance(error, ImportError):
            reason = "the package prometheus-client is missing: pip install 'ppdist[monitoring]'"
        _give_up(reason)
        finish()
        return 1
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while os.getppid() == parent and folder.is_dir():
        time.sleep(_LOOK_SECONDS)
    return 0


def open_server(address: str, port: int, measures: Measures) -> WSGIServer:
    """Opens a server that answers each GET with all numbers.

    Raises: ImportError: prometheus-client is missing.  OSError: the port cannot be opened.
    """
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(measures))
    return make_server(address, port, make_wsgi_app(registry), _Server, _Handler)


def group_samples(samples: Sequence[Sample]) -> Iterator[Any]:
    """Groups the samples by name, as prometheus-client expects."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    for name, help_text in METRICS.items():
        rows = [(labels, value) for sample_name, labels, value in samples if sample_name == name]
        if not rows:
            continue
        keys = list(rows[0][0])
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, help_text, labels=keys)
        for labels, value in rows:
            family.add_metric([labels[key] for key in keys], value)
        yield family


class _Collector:
    """The collector that prometheus-client calls at each scrape."""

    def __init__(self, measures: Measures) -> None:
        self._measures, self._lock = measures, threading.Lock()

    def collect(self) -> list[Any]:
        with self._lock:  # two scrapes may come at once
            return list(group_samples(self._measures.samples()))


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_SECONDS

    def log_message(self, format: str, *values: Any) -> None:
        """Does nothing: scrapes are not logged."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128  # unanswered clients; large, so that silent ones do not fill it

    def __init__(self, endpoint: tuple[str, int], handler: Any) -> None:
        addresses = socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)  # 4 or 6
        self.address_family = addresses[0][0]
        super().__init__(endpoint, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect or send malformed requests."""


def _say(text: str) -> None:
    say(f"--metrics_port: {text}")


def _give_up(reason: str) -> None:
    _say(f"{reason}; the run continues without it")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
