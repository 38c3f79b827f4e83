"""Which rank this is, and the patient meetings of all ranks, at the launcher's TCP store.

They are slow (tens of ms), need no collective and no device, and wait as long as is configured: for
start-up, evaluation and checkpoints, where ranks may be minutes apart.  Above `dist`, which offers
all of this, nobody imports it.
"""

import hashlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import paddle

from ppdist import pulse, wire
from ppdist.errors import JOB_VARIABLE, Failure, LaunchError, RankError, UserError, failure_of
from ppdist.joining import wait_for_store

_POLL_SECONDS = 0.02
_LINGER_SECONDS = 10.0  # rank 0 holds the store: at most so long it stays for the others to read it
_meetings = itertools.count()  # every rank counts the same meetings, so the numbers agree
_patience = 1800.0
_reached = False  # the store, by this process
_hastened = False  # its connections


def rank() -> int:
    """This process's rank in [0, world_size)."""
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def world_size() -> int:
    """Number of ranks of the run; 1 without a launcher."""
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def local_size() -> int:
    """Number of ranks on this host; 1 without a launcher."""
    return int(os.environ.get("PADDLE_LOCAL_SIZE", "1"))


def local_rank() -> int:
    """This process's number among the ranks of its host; 0 without a launcher."""
    return int(os.environ.get("PADDLE_LOCAL_RANK", "0"))


def is_main() -> bool:
    """True on rank 0.  Never put a collective behind it: see `on_main`."""
    return rank() == 0


def host() -> str:
    """This host, for messages: its name, with its address too where there are several hosts."""
    own = os.environ.get("PADDLE_CURRENT_ENDPOINT", "").rpartition(":")[0]
    several = len(set(addresses())) > 1
    return f"{socket.gethostname()} {own}" if several else socket.gethostname()


def addresses() -> list[str]:
    """The address of the host of each rank, as the launcher has told them; [""] without one."""
    endpoints = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
    return [endpoint.rpartition(":")[0] for endpoint in endpoints]


def ranks_named(ranks: Sequence[int], hosts_W: Sequence[str]) -> str:
    """`ranks 0-1 (host a) and rank 4 (host b)`

    Args: hosts_W: name of the host of each rank.
    """
    of_host: dict[str, list[int]] = {}
    for each in ranks:
        of_host.setdefault(hosts_W[each], []).append(each)
    return " and ".join(
        f"rank{'s' * (len(own) > 1)} {_ranges(own)} (host {name})" for name, own in of_host.items()
    )


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 6` for ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)


def set_patience(seconds: float) -> None:
    """How long ranks wait for one another from now on."""
    global _patience
    _patience = seconds


def exchange(value: Any) -> list[Any]:
    """What every rank gave, in rank order, through the store; it must survive JSON and be small.

    Every rank calls it; it needs no collective, so it tells before they are known to work.
    """
    if world_size() == 1:
        return [value]
    key = f"ppdist/exchange/{next(_meetings)}"
    store = _store()
    store.set(f"{key}/{rank()}", json.dumps(value))
    _arrive(key)
    values = [json.loads(bytes(store.get(f"{key}/{each}"))) for each in range(world_size())]
    _leave(key)
    return values


def barrier() -> None:
    """Waits, up to the configured patience, until every rank is here; no collective is used."""
    if world_size() == 1:
        return
    key = f"ppdist/barrier/{next(_meetings)}"
    _arrive(key)
    _leave(key)


def on_main(work: Callable[[], Any]) -> Any:
    """Runs `work` on rank 0 while the others wait, and returns its result on every rank.

    Every rank calls it.  The others wait at the store, not in a collective, so the work may take
    longer than gloo's 30 s.

    Args:
        work: takes nothing; its result must survive JSON.
    Raises: whatever `work` raised, on rank 0; on the other ranks an error of the same kind and code
        if it has one, else RankError.
    """
    if world_size() == 1:
        return work()
    key = f"ppdist/main/{next(_meetings)}"
    store = _store()
    if is_main():
        with pulse.Waiting(
            f"meeting {key}"
        ):  # the others count the same meetings; it waits for none
            pass
        try:
            result = work()
            text = json.dumps({"value": result})
            return result
        except BaseException as error:
            text = json.dumps({"failure": _told(error)})
            raise
        finally:
            store.set(f"{key}/result", text)
            store.add(f"{key}/done", 1)
            _leave(key)
    deadline = time.monotonic() + _patience
    with pulse.Waiting(f"meeting {key}"):
        while store.add(f"{key}/done", 0) == 0:
            _sleep_until(deadline, lambda: "rank 0 did not finish its work")
    outcome = json.loads(bytes(store.get(f"{key}/result")).decode())
    _leave(key)
    if "failure" in outcome:
        raise Failure(**outcome["failure"]).error()
    return outcome["value"]


def together(work: Callable[[], Any]) -> Any:
    """Runs `work` on every rank; when it fails on one, it fails on all of them.

    For what each rank does by itself and may fail at alone, such as reading the files of its
    host: otherwise the others would go on into a collective and wait there for a rank that ended.
    Every rank calls it; they may be minutes apart.

    Returns: what `work` returned on this rank.
    Raises: whatever `work` raised, on the ranks where it did; on the others an error of the same
        kind and code, or RankError if it has none, that names such a rank and says what happened.
    """
    if world_size() == 1:
        return work()
    key = f"ppdist/together/{next(_meetings)}"
    store = _store()
    try:
        result = work()
    except Exception as error:
        kind = "user" if isinstance(error, UserError) else "bug"
        store.set(f"{key}/{kind}", json.dumps(_told(error)))
        store.add(f"{key}/{kind}s", 1)
        _arrive(key)
        _leave(key)
        raise
    _arrive(key)
    failures = {
        kind: json.loads(bytes(store.get(f"{key}/{kind}")))
        for kind in ("bug", "user")
        if store.add(f"{key}/{kind}s", 0) > 0
    }
    _leave(key)
    for failure in failures.values():
        raise Failure(**failure).error()
    return result


def _told(error: BaseException) -> dict[str, Any]:
    """What the other ranks hear of an error of this one."""
    return asdict(failure_of(error).of_rank(rank(), host()))


def announce() -> Callable[[], str]:
    """Says that this rank has come so far, and waits for nobody; every rank calls it.

    Returns: names the ranks that have not come yet whenever it is called, "" when all have.
    """
    if world_size() == 1:
        return lambda: ""
    key = f"ppdist/announced/{next(_meetings)}"
    _store().add(f"{key}/{rank()}", 1)
    return lambda: _absent(key)


def _arrive(key: str) -> None:
    """Waits, up to the configured patience, until every rank has called it with this key."""
    global _hastened
    store = _store()
    deadline = time.monotonic() + _patience
    with pulse.Waiting(f"meeting {key}"):
        store.add(f"{key}/{rank()}/here", 1)
        arrived = store.add(f"{key}/arrived", 1)
        while arrived < world_size():
            _sleep_until(deadline, lambda: f"{_absent(key, '/here')} did not arrive")
            arrived = store.add(f"{key}/arrived", 0)
    if not _hastened:  # All ranks are connected now: rank 0 has their connections, too.
        wire.send_at_once()
        _hastened = True


def _absent(key: str, what: str = "") -> str:
    """The ranks that have not said at the store that they are there, "" where all have."""
    store = _store()
    hosts_W = addresses() if len(addresses()) == world_size() else ["?"] * world_size()
    ranks = [each for each in range(world_size()) if store.add(f"{key}/{each}{what}", 0) == 0]
    return ranks_named(ranks, hosts_W)


def _leave(key: str) -> None:
    """Every rank calls it when it has read what it needs; rank 0 returns after the others, because
    the store ends with its process.  It does not wait long for a rank that may have ended."""
    store = _store()
    deadline = time.monotonic() + _LINGER_SECONDS
    left = store.add(f"{key}/left", 1)
    while is_main() and left < world_size() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        left = store.add(f"{key}/left", 0)


def _sleep_until(deadline: float, missing: Callable[[], str]) -> None:
    if time.monotonic() > deadline:
        raise RankError(
            f"rank {rank()} waited {_patience:g} s (distributed.timeout_seconds): {missing()}",
            code="rank_timeout",
        )
    time.sleep(_POLL_SECONDS)


def _store() -> Any:
    global _reached
    if _reached:
        return paddle.base.core.create_or_get_global_tcp_store()
    endpoint = os.environ.get("PADDLE_MASTER")
    with pulse.Waiting("meeting ppdist/store"):
        if endpoint and not is_main():
            # Paddle would wait for it for 15 minutes, with the interpreter's lock.
            wait_for_store(endpoint, host(), _patience)
        store = paddle.base.core.create_or_get_global_tcp_store()
        _reached = True
        _require_same_job(store)
    return store


def _require_same_job(store: Any) -> None:
    """Keeps a rank of an earlier job, or of an earlier attempt, out of the meetings of this one.

    The store is open to everybody who reaches it, so it gets no more than a fingerprint.

    Raises: LaunchError: this rank is one.
    """
    job = hashlib.sha256(os.environ.get(JOB_VARIABLE, "").encode()).hexdigest()
    if is_main():
        store.set("ppdist/job", job)
        store.add("ppdist/job/said", 1)
        return
    deadline = time.monotonic() + _patience
    while store.add("ppdist/job/said", 0) == 0:
        _sleep_until(deadline, lambda: "rank 0 did not say which job it belongs to")
    if bytes(store.get("ppdist/job")).decode() != job:
        raise LaunchError(
            f"rank {rank()} (host {host()}, process {os.getpid()}) found another job at "
            f"{os.environ.get('PADDLE_MASTER')}: this one was started for a job that has ended, or "
            "PPDIST_JOB_TOKEN is not the same on all hosts",
            code="other_job",
        )
