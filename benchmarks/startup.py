"""Measures start-up: the time from a command to the end of its first training step.

The command runs as users start it, alone and through fleetrun, and ends after that step. `python
benchmarks/startup.py FILE BEGAN -c CONFIG ...` is the command that is measured.
"""

import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

Report = dict[str, Any]
# Functions of `ppdist.engine.build` -> the part of the start to which they belong.
STEPS = {
    "preflight": "checks",
    "find_start": "checks",
    "read_sets": "data",
    "build_model": "model",
    "_prepare_model": "model",
    "speed_up_cpu": "kernels' self-check",
    "build_train_step": "optimizer",
}
_SLOWEST_PACKAGES = 12  # packages that are shown


def measure_startup(
    launcher: Sequence[str], options: Sequence[str], counts: Sequence[int], repeats: int, out: Path
) -> Report:
    """Measures the seconds from the command to the end of the first step, alone and on several
    processes.

    Args:
        launcher: command of fleetrun without its options.
        options: of `ppdist train`.
        counts: of processes; 1: without fleetrun.
        out: folder for what the runs write.
    Returns: by the number of processes, medians of `repeats` starts, which take turns: seconds
        (wall), cpu_seconds (of all processes, launcher included), max_rss_mb and the parts of
        rank 0 in order, each with its seconds and CPU seconds; and `imports`: ms of CPU-bound
        import by package, slowed down by the measurement itself.
    Raises: RuntimeError: a run failed; its stderr went to ours.
    """
    starts: dict[int, list[Report]] = {count: [] for count in counts}
    for turn in range(repeats):
        # Starts take turns in alternating order: a start warms the file caches of the next one.
        for count in counts if turn % 2 == 0 else reversed(counts):
            starts[count].append(_start(launcher, options, count, out / f"{turn}-{count}"))
    report: Report = {f"{count} processes": _typical(starts[count]) for count in counts}
    return report | {"imports": _time_imports()}


def _start(launcher: Sequence[str], options: Sequence[str], count: int, folder: Path) -> Report:
    folder.mkdir(parents=True)
    file = folder / "parts.json"
    command = [sys.executable]
    if count > 1:
        command = [*launcher, "--nproc_per_node", str(count), "--log_dir", str(folder / "log")]
    command += [__file__, str(file), f"{time.time()}", *options]
    command += ["-o", f"output_dir={folder / 'run'}"]
    times_before = os.times()
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    times_after = os.times()
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode} of {' '.join(command)}")
    report: Report = json.loads(file.read_bytes())
    cpu_seconds = sum(times_after[2:4]) - sum(times_before[2:4])  # CPU seconds of children
    return report | {"cpu_seconds": cpu_seconds}


def _typical(starts: Sequence[Report]) -> Report:
    numbers = {key: median(start[key] for start in starts) for key in ("seconds", "cpu_seconds")}
    numbers["max_rss_mb"] = median(start["max_rss_mb"] for start in starts)
    parts = {
        name: {
            key: median(start["parts"][name][key] for start in starts)
            for key in ("seconds", "cpu_seconds")
        }
        for name in starts[0]["parts"]
    }
    return {**numbers, "parts": parts}


def _time_imports() -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-X", "importtime", "-c", "import ppdist.engine.run"]
    text = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    milliseconds: dict[str, float] = {}
    for own_microseconds, name in re.findall(
        r"^import time: +(\d+) \| +\d+ \| +(\S+)$", text, re.MULTILINE
    ):
        package = name.partition(".")[0]
        milliseconds[package] = milliseconds.get(package, 0.0) + int(own_microseconds) / 1000
    slowest = sorted(milliseconds, key=lambda package: -milliseconds[package])[:_SLOWEST_PACKAGES]
    return {package: round(milliseconds[package], 1) for package in slowest}


class _Parts:
    """The wall and CPU seconds of this process by part, since the command was given."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._wall, self._cpu = began, 0.0
        self.parts: dict[str, dict[str, float]] = {}

    def end(self, name: str) -> None:
        """Adds the time since the last end to this part."""
        wall, cpu = time.time(), time.process_time()
        part = self.parts.setdefault(name, {"seconds": 0.0, "cpu_seconds": 0.0})
        part["seconds"] += wall - self._wall
        part["cpu_seconds"] += cpu - self._cpu
        self._wall, self._cpu = wall, cpu

    def report(self) -> Report:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {"seconds": time.time() - self._began, "max_rss_mb": peak, "parts": self.parts}

    def watch(self, module: Any, name: str, part: str) -> None:
        """Adds calls of a function to this part, and the time before them to `the rest`."""
        original: Callable[..., Any] = getattr(module, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            self.end("the rest")
            try:
                return original(*arguments, **options)
            finally:
                self.end(part)

        setattr(module, name, watched)


def main() -> NoReturn:
    """Runs the command that is measured; it ends with the first step."""
    file, began, *options = sys.argv[1:]
    parts = _Parts(float(began))
    parts.end("launcher, Python")
    from ppdist.common.process import quiet_paddle
    from ppdist.common.signals import hold_signals

    hold_signals()
    quiet_paddle()
    sys.argv = ["ppdist train", *options]
    from ppdist.cli.train import parse, train

    arguments = parse()
    parts.end("options, their imports")
    gc.disable()  # as `train` does
    import ppdist.engine.run  # noqa: F401

    parts.end("other imports")
    from ppdist.distributed import comm, heartbeat
    from ppdist.engine import build
    from ppdist.engine.callbacks import Callback

    parts.watch(comm, "init", "ranks join")
    for name, part in STEPS.items():
        parts.watch(build, name, part)

    class FirstStep(Callback):
        def on_train_begin(self, run: Any) -> None:
            parts.end("the rest")

        def on_step_end(self, *_: Any) -> None:
            parts.end("first step")
            if comm.is_main():
                Path(file).write_text(json.dumps(parts.report()), encoding="utf-8")
            comm.barrier()
            heartbeat.beat("end", 1)  # else fleetrun would report a failure
            os._exit(0)

    train(arguments, [FirstStep()])
    raise AssertionError("there was no step")


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    main()
