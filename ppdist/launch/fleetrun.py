"""The `fleetrun` command: a front over Paddle's launcher that users of Paddle already know.

    fleetrun [--ips A,B] [--selected_gpus 0-7] [--nproc_per_node N] [--max_restart K] script.py ...

Paddle's own parser takes `0-7` for the script or for one card, two hosts for rank 0, and restarts
nothing; what each part does about it is in the modules beside this one.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from ppdist.errors import UserError
from ppdist.launch.greeting import own_greeting
from ppdist.launch.line import Line
from ppdist.launch.meeting import meet
from ppdist.launch.options import Options, help_text, parse_options
from ppdist.launch.outcome import STOPPED, USER_ERROR, Outcome
from ppdist.launch.plan import LaunchPlan, Machine, make_plan, this_machine
from ppdist.launch.process import run_job
from ppdist.launch.stock import started_by_stock_launcher

__all__ = ["fleetrun", "main", "started_by_stock_launcher"]

_RESTART_PAUSE_SECONDS = 1.0


def main() -> int:
    """Entry of the console script and of tools/launch.py; returns the exit code."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-h", "--help"):
        print(help_text())
        return 0
    try:
        return fleetrun(arguments, os.environ, this_machine, run_job)
    except UserError as error:
        _say(f"error: {error}", name="ppdist")
        return USER_ERROR
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def fleetrun(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    machine: Callable[[], Machine],
    run: Callable[[Options, LaunchPlan, Line | None], Outcome],
) -> int:
    """Plans and runs, again after a failure where that was asked for; returns the exit code.

    A restart runs the same command: it continues where the script continues, so it wants --resume.

    Args:
        machine: looks at the machine; called when the command line is known to be right.
        run: runs one plan to its end.
    Raises: LaunchError: the command is wrong or does not fit the machine.
    """
    options = parse_options(arguments, environment)
    here = machine()
    for attempt in range(options.max_restart + 1):
        plan = make_plan(options, environment, here)  # anew each time: a port may have been taken
        _say(f"{plan.description}; logs in {options.log_dir}/")
        if plan.meeting_port is None:
            outcome = run(options, plan, None)
        else:
            outcome = _run_with_others(options, plan, plan.meeting_port, run)
        if outcome.message:
            _say(outcome.message, name="ppdist" if outcome.code == USER_ERROR else "fleetrun")
        finished = outcome.code in (0, USER_ERROR, STOPPED) or outcome.stopped is not None
        if finished or attempt == options.max_restart:
            break
        _say(f"restart {attempt + 1} of {options.max_restart}{_from_the_start(options)}")
        time.sleep(_RESTART_PAUSE_SECONDS)
    return outcome.code


def _run_with_others(
    options: Options,
    plan: LaunchPlan,
    port: int,
    run: Callable[[Options, LaunchPlan, Line | None], Outcome],
) -> Outcome:
    line = meet(own_greeting(options, plan), port, options.start_timeout, _say)
    try:
        return run(options, plan, line)
    except UserError as error:  # the others wait for this host already
        return line.finish(Outcome(USER_ERROR, f"error: {error}"), [])


def _from_the_start(options: Options) -> str:
    resumes = any(word.startswith("--resume") for word in options.script_arguments)
    return "" if resumes else " (the command has no --resume, so the script begins anew)"


def _say(text: str, name: str = "fleetrun") -> None:
    print(f"{name}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
