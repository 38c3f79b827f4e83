"""What ranks of a host leave in fleetrun's folder, without any rank."""

import json
import os
from pathlib import Path

from ppdist.distributed import heartbeat
from ppdist.launch import worker
from ppdist.launch.metrics import Measures
from tests.unit.launch.beats import write_beat


class Ranks:
    """A folder of a job, and in it the attempt that has begun last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.begin(0)

    def begin(self, attempt: int) -> None:
        self.attempt = self.folder / str(attempt)
        self.attempt.mkdir()
        orders = {"processes": 2}
        (self.attempt / "job.json").write_text(json.dumps(orders))

    def say(
        self, rank: int, phase: str, step: int, inside: bool = False, silent: float = 0
    ) -> None:
        """A rank, of this very process, and its last sign of life."""
        worker.begin_report(self.attempt, rank, rank, os.getpid())
        work = heartbeat.seal_block(
            heartbeat.WORK, step, 80, 1, 8 * step, 2.0 * step, 1.5 * step, 0.5, 3.0 * step, 3.25
        )
        beat = {"inside": inside, "silent": silent, "work": work}
        write_beat(self.attempt, rank, os.getpid(), phase, step, collectives=9, **beat)

    def tell_run(self, output_dir: Path) -> None:
        told = {"output_dir": str(output_dir), "world": 4}
        heartbeat.run_path(self.attempt, 0).write_text(json.dumps(told))

    def read(self) -> dict[str, float]:
        """`name{label=value,...}` -> value, without the labels that all have."""
        said: list[str] = []
        found = Measures(self.folder, said.append).samples()
        assert not said, said
        return {key(name, labels): value for name, labels, value in found}


def key(name: str, labels: dict[str, str]) -> str:
    own = ",".join(f"{key}={labels[key]}" for key in labels if key not in ("run", "host"))
    return f"{name}{{{own}}}" if own else name
