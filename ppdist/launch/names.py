"""Hosts that are named: schedulers make names known late, and give them to other addresses."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ppdist.errors import LaunchError
from ppdist.launch.network import Network, NotYetKnown, typed_hosts
from ppdist.launch.signals import Stopped

_LOOK_SECONDS, _REPORT_SECONDS = 1.0, 10.0  # between two questions for a name; two lines about it
_ANSWER_SECONDS = 0.5  # a resolver in order takes less
_DISPUTE_SECONDS = 60.0  # in which hosts learn better: DNS servers keep an answer for 5 to 30
_SILENCE_SECONDS = 10.0  # hosts call one another more often

T = TypeVar("T")
Look = Callable[[], tuple[str | None, ...] | None]  # see Lookout.look


def once_known(
    look: Callable[[], T],
    ips: str,
    network: Network,
    seconds: float,
    say: Callable[[str], None],
    received: Sequence[int],
) -> T:
    """What `look` returns, which is called until names of --ips mean the hosts of the run.

    A pod's name is known once the pod runs, and for some seconds it still is that of the one before
    it.  Addresses are not waited for.

    Args:
        look: raises NotYetKnown for what may pass.
        seconds: how long to wait.
        received: signals so far; with one the waiting ends.
    Raises: LaunchError: not in time, or it is wrong in a way that does not pass.  Stopped.
    """
    begin = time.monotonic()
    reported: float | None = None
    while not received:
        try:
            return look()
        except NotYetKnown as error:
            now = time.monotonic()
            if all(network.resolve(name) == name for name in typed_hosts(ips)):
                raise
            if now - begin > seconds:
                raise LaunchError(
                    f"{error} (waited {seconds:g} s: --start_timeout)",
                    code="ips_not_settled",
                ) from error
            if reported is None or now - reported >= _REPORT_SECONDS:
                reported = now
                say(f"{error}; waiting for that to change ({now - begin:.0f} s)")
        time.sleep(_LOOK_SECONDS)
    raise Stopped


class Lookout:
    """What names mean by now: asked for in a thread, as a resolver may take its time to answer."""

    def __init__(self, names: Sequence[str], network: Network) -> None:
        self._names, self._network = names, network
        self._thread: threading.Thread | None = None
        self._found: tuple[str | None, ...] = ()

    def look(self) -> tuple[str | None, ...] | None:
        """The addresses, None for a name that has none; None alone: there is no answer yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask, daemon=True)
            self._thread.start()
        self._thread.join(_ANSWER_SECONDS)
        if self._thread.is_alive():
            return None
        self._thread = None
        return self._found

    def _ask(self) -> None:
        self._found = tuple(self._network.resolve(name) for name in self._names)


class Dispute:
    """Another host has other addresses for the same names, or is not of this run: that passes once
    both have learnt the new address, or never."""

    def __init__(self) -> None:
        self._text, self._since, self._heard = "", 0.0, 0.0

    def hear(self, text: str) -> None:
        """Notes what another host has said, or is told."""
        now = time.monotonic()
        if now - self._heard >= _SILENCE_SECONDS:
            self._since = now
        self._text, self._heard = text, now

    def lasts(self, found: Sequence[str | None]) -> str:
        """What is in dispute, if names are as they were and it has long been so; else "".

        Args: found: what names mean by now.
        """
        now = time.monotonic()
        if None in found:  # about to change
            self._since = now
        long = now - self._since > _DISPUTE_SECONDS and now - self._heard < _SILENCE_SECONDS
        return f"{self._text} (for {now - self._since:.0f} s)" if long else ""
