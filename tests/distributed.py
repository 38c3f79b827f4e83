"""Runs a function on N real gloo ranks of this machine; a hang is a failed test, never a stuck one.

    results = run_on_ranks(2, "tests.unit.distributed.test_comm:sums", argument)

Each rank is a process of tests/forked.py that calls the function with the argument and returns what
JSON can hold.
"""

import importlib
import json
import tempfile
import time
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.accelerator.plugin import card_environment
from tests.forked import clean_environment, end, start
from tests.ports import free_ports

RETRIED = "gloo did not connect, so this ran once more"  # counted at the end of a test run
_AFTER_FAILURE_SECONDS = 40.0  # gloo takes 30 to notice


def run_on_ranks(
    count: int,
    target: str,
    argument: Any = None,
    seconds: float = 120,
    hosts: int | None = None,
    plugin: Path | None = None,
) -> list[Any]:
    """Results of `module:function(argument)` on `count` ranks, in rank order.

    Args: hosts: the ranks are told, as by the launcher, that they are on so many hosts, the same
        number on each; None: they are told nothing, and each takes itself for a host.
        plugin: the folder of the test accelerator, whose cards the ranks get; None: CPUs.
    Raises: AssertionError: a rank failed or the time is over; it holds that rank's stderr.
    """
    try:
        return _run_once(count, target, argument, seconds, hosts, plugin)
    except AssertionError as error:
        # While ranks find each other, before any code of ours runs, gloo on a busy machine now and
        # then connects to a port that its peer has closed, or is not answered in time; a third
        # rank then waits for ever.
        signs = ("Connection refused", "] TIMEOUT", "_new_process_group_impl")
        lost = any(sign in str(error) for sign in signs)
        if "gloo/transport/tcp/pair.cc" not in str(error) or not lost:
            raise
        warnings.warn(f"{RETRIED}: {target} on {count} ranks", stacklevel=2)
        return _run_once(count, target, argument, seconds, hosts, plugin)


def _run_once(
    count: int,
    target: str,
    argument: Any,
    seconds: float,
    hosts: int | None,
    plugin: Path | None,
) -> list[Any]:
    ports = free_ports(count + 1)
    endpoints = [f"127.0.0.1:{port}" for port in ports[:count]]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(count):
            environment = clean_environment() | {
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(count),
                "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
                "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
                "PADDLE_MASTER": f"127.0.0.1:{ports[count]}",
                "PADDLE_DISTRI_BACKEND": "gloo",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            if hosts:
                local = count // hosts
                environment |= {
                    "PADDLE_LOCAL_SIZE": str(local),
                    "PADDLE_LOCAL_RANK": str(rank % local),
                }
            if plugin is not None:
                environment |= card_environment(plugin, rank)
            files = Path(folder) / str(rank)
            err = files.with_suffix(".err")
            arguments = (target, json.dumps(argument), files.with_suffix(".json"))
            process = start(_rank, arguments, environment, err, err, anew=plugin is not None)
            processes.append(process)
        try:
            codes = _wait(processes, seconds)
        finally:
            for process in processes:
                end(process)
        failed = [rank for rank, code in enumerate(codes) if code != 0]
        if failed:
            texts = (
                f"rank {rank} ({'timed out' if codes[rank] is None else codes[rank]}):\n"
                + (Path(folder) / f"{rank}.err").read_text(errors="replace")[-4000:]
                for rank in failed
            )
            raise AssertionError(f"{target} on {count} ranks:\n" + "\n".join(texts))
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]


def _rank(target: str, argument: str, file: Path) -> None:
    module, _, function = target.partition(":")
    value = getattr(importlib.import_module(module), function)(json.loads(argument))
    file.write_text(json.dumps(value))


def _wait(processes: list[BaseProcess], seconds: float) -> list[int | None]:
    """Exit codes; None: not ended in time, of which little is left once a rank has failed."""
    now = time.monotonic()
    deadline, failed = now + seconds, False
    while now < deadline and any(process.exitcode is None for process in processes):
        if not failed and any(process.exitcode for process in processes):
            deadline, failed = min(deadline, now + _AFTER_FAILURE_SECONDS), True
        time.sleep(0.02)
        now = time.monotonic()
    return [process.exitcode for process in processes]
