"""Runs a function on N real gloo ranks of this machine; a hang is a failed test, never a stuck one.

    results = run_on_ranks(2, "tests.test_dist:sums", argument)

Each rank is a process that calls the function with the argument and returns what JSON can hold.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_on_ranks(
    count: int, target: str, argument: Any = None, seconds: float = 120, threads: int = 1
) -> list[Any]:
    """Results of `module:function(argument)` on `count` ranks, in rank order.

    Raises: AssertionError: a rank failed or the time is over; it holds that rank's stderr.
    """
    try:
        return _run_once(count, target, argument, seconds, threads)
    except AssertionError as error:
        # While ranks find each other, before any code of ours runs, gloo once in hundreds of
        # starts on a busy machine connects to a port that its peer has closed.
        if "gloo/transport/tcp/pair.cc" in str(error) and "Connection refused" in str(error):
            return _run_once(count, target, argument, seconds, threads)
        raise


def _run_once(count: int, target: str, argument: Any, seconds: float, threads: int) -> list[Any]:
    ports = _free_ports(count + 1)
    endpoints = [f"127.0.0.1:{port}" for port in ports[:count]]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PADDLE_")}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(count):
            environment = clean | {
                "OMP_NUM_THREADS": str(threads),
                "PYTHONPATH": str(ROOT),
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(count),
                "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
                "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
                "PADDLE_MASTER": f"127.0.0.1:{ports[count]}",
                "PADDLE_DISTRI_BACKEND": "gloo",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            command = [sys.executable, "-m", "tests.distributed", target, json.dumps(argument)]
            with (Path(folder) / f"{rank}.err").open("wb") as stderr:
                processes.append(
                    subprocess.Popen(
                        [*command, str(Path(folder) / f"{rank}.json")],
                        cwd=ROOT,
                        env=environment,
                        stdout=stderr,
                        stderr=stderr,
                        start_new_session=True,
                    )
                )
        try:
            codes = [_wait(process, seconds) for process in processes]
        finally:
            for process in processes:
                _end(process)
        failed = [rank for rank, code in enumerate(codes) if code != 0]
        if failed:
            texts = (
                f"rank {rank} ({'timed out' if codes[rank] is None else codes[rank]}):\n"
                + (Path(folder) / f"{rank}.err").read_text(errors="replace")[-4000:]
                for rank in failed
            )
            raise AssertionError(f"{target} on {count} ranks:\n" + "\n".join(texts))
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]


def _wait(process: subprocess.Popen, seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


if __name__ == "__main__":
    module, _, function = sys.argv[1].partition(":")
    value = getattr(importlib.import_module(module), function)(json.loads(sys.argv[2]))
    Path(sys.argv[3]).write_text(json.dumps(value))
