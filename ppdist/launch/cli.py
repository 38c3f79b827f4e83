"""The `fleetrun` command: a front over Paddle's launcher; imports no Paddle.

    fleetrun [--ips A,B] [--selected_gpus 0-7] [--nproc_per_node N] [--max_restart K] script.py ...

    options      what was typed
    topology     cards, hosts, ports, and what Paddle's launcher is given
    rendezvous   hosts find each other, compare, and stay connected
    supervisor   the processes of this host's ranks
    worker       what Paddle's launcher starts for each rank
    watchdog     who makes no progress, who failed first, which exit code
    metrics      what Prometheus reads
    doctor       preflight of a host

Paddle's own parser takes `0-7` for the script or for one card, two hosts for rank 0, and restarts
nothing.  Paddle installs a `fleetrun` too, so installing or removing Paddle may replace ours.
"""

import os
import secrets
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ppdist.common.errors import LaunchError, UserError
from ppdist.common.process import (
    JOB_DIR_VARIABLE,
    JOB_VARIABLE,
    RESTART_VARIABLE,
    SKIP_STEP_VARIABLE,
)
from ppdist.launch.metrics import exporting
from ppdist.launch.options import TOKEN_VARIABLE, Options, help_text, parse_options
from ppdist.launch.rendezvous import (
    ControlChannel,
    Lookout,
    Moved,
    name_of_job,
    own_handshake,
    rendezvous,
)
from ppdist.launch.supervisor import private_files, private_folder, run_job
from ppdist.launch.topology import (
    LAUNCHER_VARIABLE,
    LaunchPlan,
    Machine,
    make_plan,
    metrics_endpoint,
    once_known,
    this_machine,
    typed_hosts,
)
from ppdist.launch.watchdog import (
    USER_ERROR,
    Outcome,
    Stopped,
    say,
    say_end,
    signals_noted,
    stopped_before,
)

_LONGEST_PAUSE_SECONDS = 60.0
_POISON_FAILURES = 2


class Restarts:
    """How often a job was restarted, how long to wait, and which steps to leave out.

    Attributes:
        attempt: 0 at first.
        skip: steps that failed twice: something in their images ends the ranks.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.skip: tuple[int, ...] = ()
        self._failures: Counter[int] = Counter()  # by step
        self._furthest = 0  # step that was reached
        self._in_vain = 0  # failures since an attempt got further than all before it

    def learn(self, outcome: Outcome) -> None:
        """An attempt has failed; the next begins."""
        self.attempt += 1
        step = outcome.step or 0
        reached = max(step, outcome.reached)
        self._in_vain = 1 if reached > self._furthest else self._in_vain + 1
        self._furthest = max(self._furthest, reached)
        for passed in [each for each in self._failures if each < step]:
            del self._failures[passed]
        if step:
            self._failures[step] += 1
            if self._failures[step] >= _POISON_FAILURES:
                self.skip = tuple(sorted({*self.skip, step}))

    def agree(self, attempt: int, skip: tuple[int, ...]) -> None:
        """What all hosts agreed on when they met."""
        self.attempt, self.skip = attempt, skip

    @property
    def pause(self) -> float:
        """Seconds until the next attempt: 1, 2, 4, ..., anew when one got further; 0 at first."""
        if self._in_vain == 0:
            return 0.0
        return min(_LONGEST_PAUSE_SECONDS, 2.0 ** min(self._in_vain - 1, 10))

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks of this attempt find in their environment."""
        found = {}
        if self.attempt:
            found[RESTART_VARIABLE] = str(self.attempt)
        if self.skip:
            found[SKIP_STEP_VARIABLE] = ",".join(str(step) for step in self.skip)
        return found


def started_by_stock_launcher(environment: Mapping[str, str] | None = None) -> str | None:
    """What to tell the user when Paddle's own launcher started this rank; None when ours did.

    Args:
        environment: of the rank; None for this process's own.
    """
    variables = os.environ if environment is None else environment
    # Both are set by every launcher of Paddle; ranks started by hand set the first alone.
    launched = "PADDLE_TRAINERS_NUM" in variables and "PADDLE_RANK_IN_NODE" in variables
    if not launched or LAUNCHER_VARIABLE in variables:
        return None
    text = (
        "started by Paddle's own launcher, not by ppdist's fleetrun: card ranges, exit codes and "
        "--max_restart work differently; use python tools/launch.py in place of fleetrun, or "
        "reinstall ppdist to get its fleetrun back"
    )
    endpoints = variables.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
    if len({endpoint.rpartition(":")[0] for endpoint in endpoints}) > 1:
        text += (
            "; with several hosts Paddle's may take two of them for rank 0 or connect to 127.0.0.1 "
            "unless --host and GLOO_SOCKET_IFNAME are given"
        )
    return text


def whose_fleetrun(search_path: str | None = None) -> tuple[str, Path | None]:
    """(`ppdist`, `paddle`, `unknown` or `none`, file) of the fleetrun that a shell would start."""
    found = shutil.which("fleetrun", path=search_path)
    if found is None:
        return "none", None
    text = Path(found).read_text(encoding="utf-8", errors="replace")
    for owner, module in (("ppdist", "ppdist.launch.cli"), ("paddle", "paddle.distributed")):
        if module in text:
            return owner, Path(found)
    return "unknown", Path(found)


__all__ = ["fleetrun", "main", "started_by_stock_launcher"]

T = TypeVar("T")
# Options, plan, channel, folder, attempt, signals: see supervisor.run_job.
Run = Callable[[Options, LaunchPlan, ControlChannel | None, Path, int, list[int]], Outcome]


def main() -> int:
    """Entry of the console script and of tools/launch.py; returns the exit code."""
    _open_streams()
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("-h", "--help"):
        print(help_text())
        return 0
    with signals_noted() as received:
        try:
            return fleetrun(arguments, os.environ, this_machine, run_job, received)
        except UserError as error:
            say(f"error: {error}", name="ppdist")
            return USER_ERROR


def _open_streams() -> None:
    """Nothing else must get the numbers of stdin, stdout or stderr that are closed (`>&-`)."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def fleetrun(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    machine: Callable[[], Machine],
    run: Run,
    received: list[int],
) -> int:
    """Plans and runs, again after a failure where that was asked for; returns the exit code.

    A restart runs the same command with PPDIST_RESTART in the environment, which makes
    tools/train.py continue from the newest checkpoint of this job.  No restart follows what would
    only be repeated (wrong input) or was wanted (a signal).

    Args:
        machine: looks at the machine; called when the command channel is known to be right.
        run: runs one plan to its end.
        received: signals so far; more may come.
    Raises: LaunchError: the command is wrong or does not fit the machine.
    """
    options = parse_options(arguments, environment)
    here = machine()
    restarts = Restarts()
    with private_folder() as folder, ExitStack() as beside:
        try:
            endpoint = _known(lambda: metrics_endpoint(options, here), options, here, received)
        except Stopped:
            return _stopped_before(received).code
        beside.enter_context(exporting(folder, endpoint))
        outcome = _attempt(options, environment, here, run, restarts, folder, received)
        while not outcome.is_final and restarts.attempt < options.max_restart:
            restarts.learn(outcome)
            say(_announcement(restarts, options.max_restart))
            try:
                outcome = _attempt(options, environment, here, run, restarts, folder, received)
            except LaunchError as error:  # the command was right; a host or a port is missing now
                say(f"error: {error}")
                outcome = Outcome(outcome.code, "")
    return outcome.code


def _attempt(
    options: Options,
    environment: Mapping[str, str],
    machine: Machine,
    run: Run,
    restarts: Restarts,
    folder: Path,
    received: list[int],
) -> Outcome:
    """Runs the job once, from meeting the other hosts to the end of all; says how it ended.

    Before a restart it pauses; several hosts meet first, so that a signal for one of them then
    reaches all.

    Args: folder: of the whole job; what an attempt needs goes below it.
    """
    token, pause = environment.get(TOKEN_VARIABLE, ""), restarts.pause
    try:
        plan, channel = _together(options, environment, machine, restarts, received)
    except Stopped:
        return _stopped_before(received)
    if channel is not None:
        restarts.agree(channel.attempt, channel.skip)
    if not _sleep(pause, channel, received):
        outcome = _stopped_before(received)
        if channel is not None:
            outcome = channel.finish(outcome, received)
            say_end(outcome)
        return outcome
    if channel is None:
        if pause:  # in which a port may have been taken
            plan = make_plan(options, environment, machine)
        say(f"{plan.description}; logs in {options.log_dir}/")
    # With --master hosts do not meet here, so that nothing can be drawn for all of them.
    drawn = channel.drawn if channel is not None else "" if options.master else None
    variables = {JOB_DIR_VARIABLE: str(folder), JOB_VARIABLE: name_of_job(token, drawn)}
    variables |= restarts.variables
    plan = replace(plan, environment=plan.environment | variables)
    own_folder = folder / str(restarts.attempt)
    try:
        with private_files(own_folder):
            own_folder.mkdir()
        outcome = run(options, plan, channel, own_folder, restarts.attempt, received)
    except UserError as error:
        if channel is None:
            raise
        # The others wait for this host already.
        code = 1 if restarts.attempt else USER_ERROR  # it has worked before
        outcome = channel.finish(Outcome(code, f"error: {error}"), [])
    say_end(outcome)
    return outcome


def _together(
    options: Options,
    environment: Mapping[str, str],
    machine: Machine,
    restarts: Restarts,
    received: list[int],
) -> tuple[LaunchPlan, ControlChannel | None]:
    """The plan, and the channel to the other hosts once they are here; None: there are none.

    Raises: LaunchError.  Stopped.
    """
    token, identity = environment.get(TOKEN_VARIABLE, ""), secrets.token_hex(16)
    lookout = Lookout(typed_hosts(options.ips or ""), machine.network)
    seconds = float(options.start_timeout)
    while True:
        plan = _known(lambda: make_plan(options, environment, machine), options, machine, received)
        if plan.rendezvous_port is None:
            return plan, None
        say(f"{plan.description}; logs in {options.log_dir}/")
        mine = own_handshake(options, plan, restarts.attempt, restarts.skip)
        mine = replace(mine, identity=identity).signed(token)
        try:
            channel = rendezvous(
                mine, plan.rendezvous_port, seconds, say, received, token, lookout.look
            )
            return plan, channel
        except Moved:
            say("names of --ips have other addresses than before; meeting the hosts there")


def _known(look: Callable[[], T], options: Options, machine: Machine, received: Sequence[int]) -> T:
    """What depends on names of --ips, once they are known.  Raises: LaunchError.  Stopped."""
    seconds = options.start_timeout
    return once_known(look, options.ips or "", machine.network, seconds, say, received)


def _stopped_before(received: Sequence[int]) -> Outcome:
    """A signal came, here or on another host, while nothing ran."""
    outcome = stopped_before((*received, signal.SIGTERM)[0], "any rank of this attempt began")
    say_end(outcome)
    return replace(outcome, message="")


def _announcement(restarts: Restarts, most: int) -> str:
    """What happens next, and why."""
    text = (
        f"restart {restarts.attempt} of {most} in {restarts.pause:g} s, from the newest checkpoint "
        f"of this job, or anew where there is none"
    )
    if restarts.skip:
        steps = ", ".join(str(step) for step in restarts.skip)
        text += f"; step {steps} failed twice: its images are left out"
    return text


def _sleep(seconds: float, channel: ControlChannel | None, received: Sequence[int]) -> bool:
    """Returns early when something happens; False if that is a signal, for any host."""
    end = time.monotonic() + seconds
    while not received and not (channel is not None and channel.watch(received)):
        if time.monotonic() >= end:
            break
        time.sleep(0.05)
    return not received and (channel is None or channel.stopped_by is None)


if __name__ == "__main__":
    sys.exit(main())
