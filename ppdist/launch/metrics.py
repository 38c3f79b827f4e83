"""Metrics of a run on this host, by name, for the exporter.

All of it is read when asked for: the heartbeat of each rank, what the attempts of the job left in
fleetrun's private folder, and on rank 0's host the files of the run.  Nothing is asked of a rank,
so nobody who asks can hold one up.  docs/monitoring.md explains each number.
"""

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppdist.common.process import is_alive
from ppdist.distributed import heartbeat
from ppdist.launch import worker

# Name -> what it says.  Those that end with _total only grow, as long as the ranks live; with
# ppdist_run_ begins what holds for the whole run: rank 0's host alone says that.
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
    "ppdist_rank_step_seconds_total": "Wall time of steps.",
    "ppdist_rank_own_seconds_total": "Of it, without waiting for other ranks.",
    "ppdist_rank_data_seconds_total": "Of its own, waiting for images.",
    "ppdist_gpu_memory_used_bytes": "Memory in use on the card, by whatever program.",
    "ppdist_gpu_memory_total_bytes": "Memory of the card.",
    "ppdist_gpu_utilisation_ratio": "Part of the time in which the card worked, 0..1.",
    "ppdist_gpu_temperature_celsius": "Temperature of the card.",
    "ppdist_gpu_power_watts": "Power that the card draws.",
}
# Of an evaluation; those of single classes would be a series each.
EVALUATED = (
    "mAP", "mAP50", "mAP75", "fitness", "precision", "recall", "f1", "top1", "top5", "val_loss",
)  # fmt: skip
_TAIL_BYTES = 4 << 20  # read of a metrics.jsonl that was there before
_CHECKPOINT = re.compile(r"step-(\d+)")

Sample = tuple[str, dict[str, str], float]  # name, labels, value
# Of the cards with these labels: name, card, value.
CardsReader = Callable[[Sequence[str]], Iterable[tuple[str, str, float]]]


class Measures:
    """Of the ranks of one host, over all attempts of a job."""

    def __init__(self, folder: Path, cards: CardsReader, say: Callable[[str], None]) -> None:
        """
        Args:
            folder: the private one of fleetrun; an attempt has one in it, named by its number.
            cards: reads the GPUs of these labels.
            say: for what cannot be read, each kind once.
        """
        self._folder, self._cards, self._say = folder, cards, say
        self._run: dict[str, Any] = {}  # as heartbeat.tell_run has said
        self._evaluations: Evaluations | None = None
        self._said: set[str] = set()

    def samples(self) -> list[Sample]:
        """All that can be read now; what cannot is left out, and said once."""
        attempt = max((int(path.name) for path in self._folder.glob("[0-9]*")), default=0)
        folder = self._folder / str(attempt)
        with self._said_once("run"):
            for path in sorted(folder.glob("run-*.json"))[:1]:
                told = json.loads(path.read_text(encoding="utf-8"))
                self._run = {"output_dir": str(told["output_dir"]), "world": int(told["world"])}
        labels = {"run": Path(self._run.get("output_dir", "")).name, "host": socket.gethostname()}
        found: list[Sample] = []
        for part in (self._of_run, self._of_host, self._of_ranks):
            with self._said_once(part.__name__):
                for name, more, value in part(folder):
                    found.append((name, labels | more, value))
        return found

    @contextmanager
    def _said_once(self, part: str) -> Iterator[None]:
        """Whatever cannot be read of this part, the rest can."""
        try:
            yield
        except Exception as error:
            if part not in self._said:
                self._said.add(part)
                self._say(f"some numbers cannot be read: {error!r}")

    def _of_host(self, folder: Path) -> Iterator[Sample]:
        yield "ppdist_host_restarts_total", {}, float(folder.name)
        stalls = len(list(self._folder.glob("[0-9]*/watch.json")))
        yield "ppdist_host_stalls_total", {}, float(stalls)
        place = folder / "job.json"
        orders = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
        yield "ppdist_host_ranks", {}, float(orders.get("processes", 0))
        for name, card, value in self._cards(orders.get("cards", ())):
            yield name, {"gpu": card}, value

    def _of_ranks(self, folder: Path) -> Iterator[Sample]:
        reports = {each["rank"]: each for each in worker.reports(folder)}
        up = {
            rank: each["code"] is None and each["child"] != 0 and is_alive(each["child"])
            for rank, each in reports.items()
        }
        readings = {
            rank: reading
            for rank in reports
            if up[rank] and (reading := heartbeat.read(heartbeat.file_of(folder, rank))) is not None
        }
        furthest = max((reading.step for reading in readings.values()), default=0)
        for rank in reports:
            labels = {"rank": str(rank)}
            yield "ppdist_rank_up", labels, float(up[rank])
            if rank not in readings:
                continue
            reading = readings[rank]
            silent = max(0.0, time.monotonic() - reading.seconds)
            yield "ppdist_rank_silent_seconds", labels, silent
            yield "ppdist_rank_waiting", labels, float(reading.inside)
            for phase in heartbeat.PHASES:
                yield "ppdist_rank_phase", {**labels, "phase": phase}, float(phase == reading.phase)
            if reading.phase != "start":  # before, it does not know where the run is
                yield "ppdist_rank_step", labels, float(reading.step)
                yield "ppdist_rank_lag_steps", labels, float(furthest - reading.step)
            work = heartbeat.read_work(heartbeat.file_of(folder, rank))
            if work is not None:
                yield "ppdist_rank_steps_total", labels, float(work.steps)
                yield "ppdist_rank_step_seconds_total", labels, work.step_seconds
                yield "ppdist_rank_own_seconds_total", labels, work.own_seconds
                yield "ppdist_rank_data_seconds_total", labels, work.data_seconds

    def _of_run(self, folder: Path) -> Iterator[Sample]:
        """Nothing but on rank 0's host."""
        path = heartbeat.file_of(folder, 0)
        if not path.exists():
            return
        reading, work = heartbeat.read(path), heartbeat.read_work(path)
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
        yield "ppdist_run_ranks", {}, float(self._run["world"])
        output_dir = Path(self._run["output_dir"])
        saved = newest_checkpoint(output_dir / "checkpoints")
        if saved is not None:
            yield "ppdist_run_checkpoint_step", {}, float(saved[0])
        # A failure loses no more than what was learned since this attempt began.
        began = (folder / "job.json").stat().st_mtime
        since = began if saved is None else max(began, saved[1])
        yield "ppdist_run_checkpoint_age_seconds", {}, max(0.0, time.time() - since)
        if self._evaluations is None:
            self._evaluations = Evaluations(output_dir / "metrics.jsonl")
        last = self._evaluations.last()
        for name in EVALUATED:
            if isinstance(last.get(name), float | int):
                yield "ppdist_run_evaluation", {"metric": name}, float(last[name])
        if last:
            yield "ppdist_run_evaluation_step", {}, float(last["step"])


def newest_checkpoint(folder: Path) -> tuple[int, float] | None:
    """Its step, and when its manifest was written, seconds since 1970; None without any."""
    found = []
    for path in folder.glob("step-*/manifest.json"):
        step = _CHECKPOINT.fullmatch(path.parent.name)
        if step is not None:
            found.append((int(step[1]), path))
    for number, path in sorted(found, reverse=True):
        try:
            return number, path.stat().st_mtime
        except FileNotFoundError:  # it was just pruned
            continue
    return None


class Evaluations:
    """The last evaluation in a metrics.jsonl; each time only what was added is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: dict[str, Any] = {}
        self._identity, self._read = -1, 0

    def last(self) -> dict[str, Any]:
        """{} while there is none, or no file."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            self._identity, self._last = -1, {}
            return self._last
        with file:
            state = os.fstat(file.fileno())
            if state.st_ino != self._identity or state.st_size < self._read:  # written anew
                self._identity, self._last = state.st_ino, {}
                self._read = max(0, state.st_size - _TAIL_BYTES)
            file.seek(self._read)
            text = file.read(_TAIL_BYTES)
        whole = text[: text.rfind(b"\n") + 1]
        if not whole and len(text) == _TAIL_BYTES:
            whole = text  # of a line as long as none of ours: go on behind it
        self._read += len(whole)
        for line in whole.splitlines():
            if b'"eval_seconds"' in line:
                self._note(line)
        return self._last

    def _note(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:  # cut short by a crash, or by where reading began
            return
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            self._last = record
