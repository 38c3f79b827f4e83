"""A job: one command, from its first attempt to its last."""

import hashlib
import hmac
import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ppdist.common.errors import LaunchError, UserError, with_code
from ppdist.common.files import read_json
from ppdist.common.job import (
    DIGESTS_NOTE,
    JOB_DIR_VARIABLE,
    JOB_VARIABLE,
    MIN_HOSTS_VARIABLE,
    RESTART_VARIABLE,
    SKIP_STEP_VARIABLE,
    STARTED_VARIABLE,
)
from ppdist.common.process import STOPPED, USER_ERROR, boot_seconds
from ppdist.launch.console import say, say_end
from ppdist.launch.control_channel import ControlChannel
from ppdist.launch.handshake import make_handshake
from ppdist.launch.metrics import export_metrics
from ppdist.launch.network import retry_until_known, typed_hosts
from ppdist.launch.options import Options, parse_options
from ppdist.launch.outcome import Outcome, make_early_stop
from ppdist.launch.rendezvous import Hub, rendezvous
from ppdist.launch.signals import Stopped
from ppdist.launch.supervisor import private_files, private_folder
from ppdist.launch.topology import LaunchPlan, Machine, make_plan, metrics_endpoint

_LONGEST_PAUSE_SECONDS = 60.0
_POISON_FAILURES = 2

T = TypeVar("T")
# Options, plan, channel, folder, restarts, signals: see supervisor.run_job.
Run = Callable[[Options, LaunchPlan, ControlChannel | None, Path, int, list[int]], Outcome]


def fleetrun(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    machine: Callable[[], Machine],
    run: Run,
    received: list[int],
) -> int:
    """Plans, runs and restarts a job; returns its exit code.

    A restart runs the same command with PPDIST_RESTART in the environment, which makes
    tools/train.py continue from the newest checkpoint of this job.  It does not restart after an
    error that would only recur (wrong input) or a requested stop (a signal).  With --min_hosts an
    attempt also ends when a host leaves or comes back; the next attempt, of the hosts present then,
    does not count as a restart.

    Args:
        machine: inspects the machine; called once the command line is known to be valid.
        run: runs one plan to its end.
        received: signals so far; more may come.
    Raises: LaunchError: the command is wrong or does not fit the machine.
    """
    options = parse_options(arguments, environment)
    this_machine = machine()
    with private_folder() as folder, ExitStack() as resources:
        job = _Job(options, environment, this_machine, run, folder, received)
        try:
            endpoint = job.wait_for_names(lambda: metrics_endpoint(options, this_machine))
        except Stopped:
            return report_early_stop(received).code
        resources.enter_context(export_metrics(folder, endpoint))
        resources.callback(job.close)
        outcome = job.attempt()
        while not outcome.is_final and (
            outcome.goes_on or job.restarts.failures < options.max_restart
        ):
            if outcome.goes_on:
                job.restarts.change_hosts()
                say(
                    f"{job.describe_hub_call}the hosts that are there go on from the newest "
                    "checkpoint"
                )
            else:
                job.restarts.learn(outcome)
                say(job.restarts.announcement(options.max_restart))
            try:
                outcome = job.attempt()
            except LaunchError as error:
                # The command was valid at first, so now a host or a port is missing.
                say(f"error: {error}")
                # The hub, or too many hosts, did not come back in time.
                if outcome.goes_on:
                    return outcome.code
                outcome = Outcome(outcome.code, "")
        job.stopped, job.is_sent_away = outcome.code == STOPPED, outcome.is_sent_away
    return outcome.code


class _Job:
    """A job on this host: all attempts of one command.  Takes the arguments of `fleetrun`."""

    def __init__(
        self,
        options: Options,
        environment: Mapping[str, str],
        machine: Machine,
        run: Run,
        folder: Path,
        received: list[int],
    ) -> None:
        self.options, self.environment, self.machine = options, environment, machine
        self.run, self.folder, self.received = run, folder, received
        self.restarts = Restarts()
        self.hub: Hub | None = None  # hub of the job, on its first host
        self.stopped = False  # the job was ended by a signal, and everything is saved
        self.is_sent_away = False  # only this host ends, the others go on
        self.started = boot_seconds()

    def attempt(self) -> Outcome:
        """Runs the command once on all hosts; returns its outcome.

        A restart begins with a pause.  Several hosts connect before the pause, so that a signal to
        one of them reaches all.
        """
        pause = self.restarts.pause
        try:
            plan, channel = self.connect_hosts()
        except Stopped:
            return report_early_stop(self.received)
        if channel is not None:
            self.restarts.agree(channel.attempt, channel.changes, channel.skip)
        if not pause_attempt(pause, channel, self.received):
            outcome = report_early_stop(self.received)
            if channel is not None:
                outcome = channel.finish(outcome, self.received)
                say_end(outcome)
            return outcome
        if channel is None:
            # During the pause another program may have taken a port.
            if pause:
                plan = self.plan()
            self.say_plan(plan)
        # With --master fleetrun connects no hosts, so they have no common nonce.
        nonce = channel.nonce if channel is not None else "" if self.options.master else None
        variables = {JOB_VARIABLE: name_job(self.options.token, nonce)}
        variables |= {JOB_DIR_VARIABLE: str(self.folder), **self.restarts.variables}
        variables |= {STARTED_VARIABLE: f"{self.started}"}
        hosts = len(typed_hosts(self.options.ips or ""))
        if self.options.min_hosts is not None and self.options.min_hosts < hosts:
            variables[MIN_HOSTS_VARIABLE] = f"{self.options.min_hosts}"
        plan = replace(plan, environment=plan.environment | variables)
        restarts = self.restarts.attempt
        folder = self.folder / str(restarts)
        try:
            with private_files(folder):
                folder.mkdir()
            outcome = self.run(self.options, plan, channel, folder, restarts, self.received)
            if self.hub is not None:
                self.hub.count_comings(outcome.made_step)
        except UserError as error:
            if channel is None:
                raise
            # The other hosts are already waiting for this one.
            # The command has worked before, so this is not an input error.
            code = 1 if restarts else USER_ERROR
            message = f"error: {with_code(str(error), error.code)}"
            outcome = channel.finish(Outcome(code, message, made_step=False), [])
        say_end(outcome)
        return outcome

    @property
    def describe_hub_call(self) -> str:
        """Describes how this host rejoins the other hosts; "" on the hub."""
        if self.hub is not None:
            return ""
        first, *_ = typed_hosts(self.options.ips or "")
        seconds = f"{self.options.start_timeout:g} s (--start_timeout)"
        return f"calling the hub of the job, {first}, for up to {seconds}; "

    def close(self) -> None:
        """Closes the hub, at the end of this fleetrun."""
        if self.hub is not None:
            self.hub.close(self.stopped, self.is_sent_away)

    def connect_hosts(self) -> tuple[LaunchPlan, ControlChannel | None]:
        """Builds the plan, and connects this host to the other hosts if there are any.

        Raises: LaunchError.  Stopped.
        """
        plan = self.wait_for_names(self.plan)
        if plan.rendezvous_port is None:
            return plan, None
        self.say_plan(plan)
        restarts, port = self.restarts, plan.rendezvous_port
        local = make_handshake(
            self.options, plan, restarts.attempt, restarts.changes, restarts.skip
        )
        if local.is_first and self.hub is None:
            note = self.folder / DIGESTS_NOTE
            self.hub = Hub(local, port, say, self.options.token, lambda: read_json(note))
        channel = rendezvous(
            local,
            port,
            self.options.start_timeout,
            say,
            self.received,
            self.options.token,
            self.machine.network.resolve,
            self.hub,
            self.digest_command(),
        )
        return replace(plan, hosts=channel.hosts), channel

    def digest_command(self) -> tuple[str, ...]:
        """Returns the command that writes the digests of this host's code and data.

        Returns: () if the script is not `ppdist train`.
        """
        if not self.options.trains:
            return ()
        command = (sys.executable, "-u", self.options.script, *self.options.script_arguments)
        return (*command, "--digests", f"{self.folder / 'own-digests.json'}")

    def plan(self) -> LaunchPlan:
        return make_plan(self.options, self.environment, self.machine)

    def say_plan(self, plan: LaunchPlan) -> None:
        say(f"{plan.description}; logs in {self.options.log_dir}/")

    def wait_for_names(self, decide: Callable[[], T]) -> T:
        """Calls `decide` until the names in --ips resolve; returns its result.

        Raises: LaunchError.  Stopped.
        """
        ips, seconds = self.options.ips or "", self.options.start_timeout
        return retry_until_known(decide, ips, self.machine.network, seconds, say, self.received)


def name_job(token: str, nonce: str | None = None) -> str:
    """Returns the name of this attempt, the same on all of its hosts.

    Args: nonce: random text from the first host; None if this host is alone and generates its own.
    """
    nonce = secrets.token_hex(16) if nonce is None else nonce
    return hmac.new(os.fsencode(token), nonce.encode(), hashlib.sha256).hexdigest()


def report_early_stop(received: Sequence[int]) -> Outcome:
    """Reports that a signal came, here or on another host, before any rank began."""
    outcome = make_early_stop((*received, signal.SIGTERM)[0], "any rank of this attempt began")
    say_end(outcome)
    return replace(outcome, message="")


def pause_attempt(seconds: float, channel: ControlChannel | None, received: Sequence[int]) -> bool:
    """Waits for `seconds`; returns False if a signal came meanwhile, here or on another host."""
    end = time.monotonic() + seconds
    while not received and not (channel is not None and channel.watch(received)):
        if time.monotonic() >= end:
            break
        time.sleep(0.05)
    return not received and (channel is None or channel.stopped_by is None)


class Restarts:
    """The restarts of a job: their number, the pauses between them, the steps to skip.

    Attributes:
        attempt: number of this attempt, from 0.
        changes: number of attempts that ended because a host left or joined.
        skip: steps that failed twice, because something in their images ends the ranks.
    """

    def __init__(self) -> None:
        self.attempt = self.changes = 0
        self.skip: tuple[int, ...] = ()
        self._failures: Counter[int] = Counter()  # failures by step
        self._furthest = 0  # last step that any attempt has begun
        self._without_progress = 0  # failures since an attempt got further than all before it

    def learn(self, outcome: Outcome) -> None:
        """Counts a failed attempt, and adds a step that has failed twice to `skip`."""
        self.attempt += 1
        step = outcome.step or 0
        reached = max(step, outcome.reached)
        self._without_progress = 1 if reached > self._furthest else self._without_progress + 1
        self._furthest = max(self._furthest, reached)
        for passed in [failed for failed in self._failures if failed < step]:
            del self._failures[passed]
        if step:
            self._failures[step] += 1
            if self._failures[step] >= _POISON_FAILURES:
                self.skip = tuple(sorted({*self.skip, step}))

    def change_hosts(self) -> None:
        """Counts an attempt that ended because its hosts changed; nothing has failed."""
        self.attempt += 1
        self.changes += 1
        self._without_progress = 0

    def agree(self, attempt: int, changes: int, skip: tuple[int, ...]) -> None:
        """Adopts the values that all hosts agreed on at the rendezvous."""
        self.attempt, self.changes, self.skip = attempt, changes, skip

    @property
    def failures(self) -> int:
        return self.attempt - self.changes

    @property
    def pause(self) -> float:
        """Returns the seconds until the next attempt: 1, 2, 4, ...; 0 before the first."""
        if self._without_progress == 0:
            return 0.0
        return min(_LONGEST_PAUSE_SECONDS, 2.0 ** min(self._without_progress - 1, 10))

    @property
    def variables(self) -> dict[str, str]:
        """Returns the environment variables for the ranks of this attempt."""
        variables = {}
        if self.attempt:
            variables[RESTART_VARIABLE] = str(self.attempt)
        if self.skip:
            variables[SKIP_STEP_VARIABLE] = ",".join(str(step) for step in self.skip)
        return variables

    def announcement(self, max_restart: int) -> str:
        """Returns a message that says what happens next, and why."""
        text = (
            f"restart {self.failures} of {max_restart} in {self.pause:g} s, from the newest "
            f"checkpoint of this job, or anew where there is none"
        )
        if self.skip:
            steps = ", ".join(str(step) for step in self.skip)
            text += f"; step {steps} failed twice: its images are left out"
        return text
