"""The `fleetrun` command: starts the ranks of a run; imports no Paddle.

    fleetrun [--ips A,B] [--selected_gpus 0-7] [--nproc_per_node N] [--max_restart K] script.py ...

    options          what was typed
    job              the attempts of a job, from the first to the last
    topology         the ranks of this host, and the variables of each
      cards          the cards present, visible and requested
      network        hosts, interfaces, ports
    rendezvous       hosts call the first, which compares and says who trains
      handshake      what must agree
      connection     authentic lines between two of them
    control_channel  hosts tell one another how they end
    supervisor       the processes of this host's ranks
      worker         what is started for each rank, and starts the script
      watchdog       ends ranks that make no progress
      outcome        the rank that failed first, the message, the exit code
    signals console  requests to stop, lines for the user
    metrics          what Prometheus reads
    doctor           preflight of a host

Paddle's own parser takes `0-7` for the script or for one card, two hosts for rank 0, and restarts
nothing.  Paddle installs a `fleetrun` too, so installing or removing Paddle may replace ours.

Everything else is imported once signals are held: an earlier one would end Python with a traceback.
"""

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ppdist.common.signals import hold_signals, release_signals

if TYPE_CHECKING:
    from pathlib import Path


def _asks_for_help(arguments: list[str]) -> bool:
    """Returns True if --help is before the script, which may have such an option itself."""
    words = iter(arguments)
    for word in words:
        if not word.startswith("-") or word == "--":
            return False
        value = "" if "=" in word else next(words, "")
        if {word, value} & {"-h", "--help"}:
            return True
    return False


def main() -> int:
    """Runs the console script and tools/launch.py; returns the exit code."""
    hold_signals()
    _open_streams()
    from ppdist.common import limits
    from ppdist.common.errors import UserError, with_code

    try:
        limits.require_limits(limits.LEAST_FILES)
    except UserError as error:
        # The modules below may not even be importable under such limits.
        print(f"ppdist: error: {with_code(str(error), error.code)}", file=sys.stderr)
        return 2
    from ppdist.common import json_lines, process
    from ppdist.launch import console, options, supervisor, topology
    from ppdist.launch.job import fleetrun
    from ppdist.launch.signals import collect_signals

    arguments = sys.argv[1:]
    if _asks_for_help(arguments):
        process.run(lambda: print(options.help_text()))  # ends silently behind `| head`
    # fleetrun reads no configuration; its ranks inherit this setting.
    if "log.format=json" in arguments:
        os.environ[json_lines.FORMAT_VARIABLE] = "json"
    with collect_signals() as received:
        release_signals()
        try:
            inspect, run = topology.this_machine, supervisor.run_job
            return fleetrun(arguments, os.environ, inspect, run, received)
        except UserError as error:
            console.say(f"error: {with_code(str(error), error.code)}", name="ppdist")
            return process.USER_ERROR
        finally:
            console.finish()


def _open_streams() -> None:
    """Opens standard streams that are closed, so that no other file gets their descriptors."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # os.open takes the lowest free descriptor, which is this one.
            os.open(os.devnull, os.O_RDWR)


def warn_of_stock_launcher(environment: Mapping[str, str] | None = None) -> str | None:
    """Returns a warning if Paddle's own launcher started this rank; None otherwise.

    Args:
        environment: environment of the rank; None: that of this process.
    """
    variables = os.environ if environment is None else environment
    # Every launcher of Paddle sets both; for ranks started by hand only the first is set.
    if not {"PADDLE_TRAINERS_NUM", "PADDLE_RANK_IN_NODE"} <= variables.keys():
        return None
    from ppdist.launch.topology import LAUNCHER_VARIABLE

    if LAUNCHER_VARIABLE in variables:
        return None
    text = (
        "started by Paddle's own launcher, not by ppdist's fleetrun: card ranges, exit codes and "
        "--max_restart work differently; type `ppdist launch` in place of fleetrun (in a clone: "
        "python tools/launch.py), or bring ours back: "
        "pip install --force-reinstall --no-deps ppdist"
    )
    endpoints = variables.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
    if len({endpoint.rpartition(":")[0] for endpoint in endpoints}) > 1:
        text += (
            "; with several hosts Paddle's may take two of them for rank 0 or connect to 127.0.0.1 "
            "unless --host and GLOO_SOCKET_IFNAME are given"
        )
    return text


def find_fleetrun(search_path: str | None = None) -> "tuple[str, Path | None]":
    """Finds `fleetrun` on PATH; returns its owner and path.

    Returns: the owner is `ppdist`, `paddle`, `unknown`, or `none` if there is no such command.
    """
    import shutil
    from pathlib import Path

    script = shutil.which("fleetrun", path=search_path)
    if script is None:
        return "none", None
    text = Path(script).read_text(encoding="utf-8", errors="replace")
    for owner, module in (("ppdist", "ppdist.launch.cli"), ("paddle", "paddle.distributed")):
        if module in text:
            return owner, Path(script)
    return "unknown", Path(script)


if __name__ == "__main__":
    sys.exit(main())
