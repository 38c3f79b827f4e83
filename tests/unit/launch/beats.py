"""Signs of life of ranks that are not there."""

import time
from pathlib import Path

from ppdist.distributed import heartbeat


def write_beat(
    folder: Path,
    rank: int,
    pid: int,
    phase: str,
    step: int,
    *,
    collectives: int = 0,
    place: str = "",
    inside: bool | None = None,
    silent: float = 0.0,
    timeout: float = 9.0,
    limit: float = 9.0,
    steps: int = 1,
    measured: int = 1,
    seconds: float = 1.0,
    work: bytes = b"",
) -> None:
    """Writes what a rank says.

    Args:
        place: of the collective it is in, else it works alone, unless `inside` says otherwise.
        silent: for how long it has said nothing, s.
        steps, measured: since the start or an evaluation, and in all.
        seconds: of the last step.
        work: what stands behind it.
    """
    packed = heartbeat.seal_block(
        heartbeat.BEAT, pid, heartbeat.PHASES.index(phase),
        bool(place) if inside is None else inside, step, collectives,
        time.monotonic_ns() - round(silent * 1e9), timeout, limit, place.encode(), steps, measured,
        seconds,
    )  # fmt: skip
    heartbeat.heartbeat_path(folder, rank).write_bytes(packed + work)
