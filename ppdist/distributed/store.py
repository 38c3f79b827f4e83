"""Barriers at the launcher's TCP store, and checks before ranks join.

Barriers are slow (tens of ms), need no collective and no device, and wait for the configured time.
comm.py re-exports them for the rest of ppdist.

Before ranks join Paddle's group, plain sockets detect within seconds the problems on which Paddle
would wait: 15 minutes for a store that cannot be reached, 3 minutes for a port of gloo that a
firewall blocks, for ever if ranks join in different ways.  The message names the two hosts.  Also
here: the number of bytes that this process has sent, according to the kernel.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from ppdist.common.errors import (
    Failure,
    LaunchError,
    RankError,
    StorageError,
    UserError,
    failure_of,
)
from ppdist.common.job import JOB_VARIABLE, RESTART_VARIABLE
from ppdist.common.retry import with_retries
from ppdist.distributed import heartbeat, paddle_api
from ppdist.distributed.ranks import (
    addresses,
    host,
    is_main,
    rank,
    ranks_named,
    world_size,
)

_T = TypeVar("_T")
AllGatherObject = Callable[[Any], list[Any]]  # gathers an object of every rank, in rank order
_LOGGER = logging.getLogger("ppdist")
_FIRST_POLL_SECONDS, _POLL_SECONDS = 0.0005, 0.02
_LONG_POLL_SECONDS, _POLLS = 0.2, 100  # a long wait is polled less often
_REQUEST_SECONDS = 0.0001  # time that the store needs for one poll by one rank
_LINGER_SECONDS = 10.0  # longest time that rank 0, which hosts the store, lets the others read
_SIGN_SECONDS = 5.0  # between two signs of life at the store, and between two checks of them
_SIGNS = "ppdist/alive"
_barriers = itertools.count()  # every rank counts the same barriers, so the numbers agree
_HERE, _GAVE = 1, 3  # a rank has arrived without a value, or with one
_RANKS_OF_A_KEY = 31  # the store counts in int64, and each rank uses two bits
_timeout = 1800.0
_reached = False  # whether this process has reached the store
_nagle_disabled = False  # on the connections of this process
_signed = -math.inf  # when this rank last gave a sign of life at the store


def set_timeout(seconds: float) -> None:
    """Sets how long ranks wait for one another."""
    global _timeout
    _timeout = seconds
    # Paddle reads it when the ranks join.
    os.environ["PADDLE_PG_TIMEOUT"] = f"{math.ceil(seconds * 1000)}"


def alive() -> None:
    """Signals to fleetrun and waiting ranks that work continues.

    The other ranks wait for distributed.timeout_seconds after this rank's last sign of life.  So
    call this, in the main thread, when a part of the work is done, and never while nothing happens:
    a rank that hangs has to be detected.  Local; it costs a microsecond, and a request to the store
    every few seconds.
    """
    global _signed
    heartbeat.alive()
    if world_size() > 1 and time.monotonic() - _signed >= _sign_seconds():
        _signed = time.monotonic()
        _store().add(_SIGNS, 1)


def _sign_seconds() -> float:
    return min(_SIGN_SECONDS, _timeout / 10)


def storage_seconds() -> float:
    """Returns how long a rank waits for unreachable storage, in seconds."""
    return _timeout / 2


def once_there(call: Callable[[], _T], seconds: float | None = None) -> _T:
    """Calls `call`, and retries while storage is unreachable; returns its result.  Local.

    Args: seconds: how long to wait; None: `storage_seconds`.
    Raises: StorageError: storage stays unreachable.
    """

    def pause(seconds: float, _: StorageError) -> None:
        heartbeat.alive()
        time.sleep(seconds)

    return with_retries(call, storage_seconds() if seconds is None else seconds, pause=pause)


def was_restarted() -> bool:
    """Returns True if fleetrun restarted this job."""
    return bool(os.environ.get(RESTART_VARIABLE))


def all_gather_object(value: Any) -> list[Any]:
    """Gathers an object from every rank, in rank order; see `gather_on_main`.  Collective."""
    return gather_on_main(value, lambda values_W: values_W)


def barrier() -> None:
    """Waits until every rank has arrived, up to the configured timeout.  Collective."""
    gather_on_main(None, lambda values_W: None)


def gather_on_main(value: Any, work: Callable[[list[Any]], Any]) -> Any:
    """Runs `work` on rank 0 with all ranks' values; all ranks get the result.  Collective.

    No device takes part, so this works before ranks have joined.  A rank sends a few requests to
    the store, however many ranks there are, and rank 0 one more for each value that is not None.

    Args:
        value: a small value; it must be JSON-serializable, as must the result.
        work: takes the values in rank order.
    Raises: as in `run_on_main`.
    """
    if world_size() == 1:
        return work([value])
    key = f"ppdist/gather/{next(_barriers)}"
    store = _store()

    def send_value() -> None:
        if value is not None:
            store.set(f"{key}/{rank()}", json.dumps(value))
        _arrive(key, _HERE if value is None else _GAVE)

    def describe_absent() -> str:
        return f"{_name_absent(key) or 'the answer of rank 0'} did not arrive"

    def gather_values() -> Any:
        timeout = _Timeout()
        with heartbeat.Waiting(f"barrier {key}"):
            send_value()
            while 0 in (arrived_W := _read_arrivals(key)):
                timeout.sleep(describe_absent)
            _disable_nagle_once()
            texts_W = [
                bytes(store.get(f"{key}/{rank_index}")) if arrived == _GAVE else "null"
                for rank_index, arrived in enumerate(arrived_W)
            ]
        return work([json.loads(text) for text in texts_W])

    if is_main():
        return _send_answer(key, gather_values)
    with heartbeat.Waiting(f"barrier {key}"):
        send_value()
        return _await_answer(key, describe_absent)


def run_on_main(work: Callable[[], Any]) -> Any:
    """Runs `work` on rank 0; all ranks get the result.  Collective.

    The other ranks wait at the store, not in a collective, so the work may take longer than gloo's
    30 s, and longer than distributed.timeout_seconds if it calls `alive` (or adds to a Progress).

    Args:
        work: its result must be JSON-serializable.
    Raises: whatever `work` raised, on rank 0; on the other ranks an error of the same kind and code
        if it has one, else RankError.
    """
    if world_size() == 1:
        return work()
    key = f"ppdist/main/{next(_barriers)}"
    if is_main():
        with heartbeat.Waiting(f"barrier {key}"):
            # The context is entered only so that this rank counts the same barriers as the others.
            pass
        return _send_answer(key, work)
    with heartbeat.Waiting(f"barrier {key}"):
        return _await_answer(key, lambda: "rank 0 did not finish its work")


def _send_answer(key: str, work: Callable[[], Any]) -> Any:
    """Runs `work`, and sends its result or error to the other ranks; returns or raises it."""
    store = _store()
    try:
        result = work()
        answer = json.dumps({"value": result})
        return result
    except BaseException as error:
        answer = json.dumps({"failure": _failure_for_peers(error)})
        raise
    finally:
        store.set(f"{key}/result", answer)
        store.add(f"{key}/done", 1)
        _leave_store(key)


def _await_answer(key: str, missing: Callable[[], str]) -> Any:
    """Waits for the answer that rank 0 gave to `_send_answer`; returns or raises it.

    Args: missing: returns a message about what did not happen, if the answer does not come in time.
    """
    store, timeout = _store(), _Timeout()
    while store.add(f"{key}/done", 0) == 0:
        timeout.sleep(missing)
    outcome = json.loads(bytes(store.get(f"{key}/result")).decode())
    _leave_store(key)
    if "failure" in outcome:
        raise Failure(**outcome["failure"]).error()
    return outcome["value"]


def run_on_all_ranks(work: Callable[[], Any]) -> Any:
    """Runs `work` on every rank; a failure on one rank is raised on all ranks.  Collective.

    Use it for work that may fail on one rank alone, such as reading the files of its host:
    otherwise the other ranks would enter a collective and wait there for a rank that has ended.
    Ranks may arrive minutes apart.

    Returns: the result of `work` on this rank.
    Raises: the error of `work`, on the ranks where it failed; on the other ranks an error of the
        same kind and code (RankError if it has none) that names such a rank and says what happened.
    """
    if world_size() == 1:
        return work()
    try:
        result = work()
    except Exception as error:
        gather_on_main([isinstance(error, UserError), _failure_for_peers(error)], _choose_failure)
        raise
    failure = gather_on_main(None, _choose_failure)
    if failure is not None:
        raise Failure(**failure).error()
    return result


def _choose_failure(failures_W: Sequence[Any]) -> dict[str, Any] | None:
    """Chooses the failure to report to all ranks: bugs before users' mistakes."""
    failed = [failure for failure in failures_W if failure is not None]
    return min(failed, key=lambda failure: failure[0])[1] if failed else None


def _failure_for_peers(error: BaseException) -> dict[str, Any]:
    """Converts an error of this rank to the fields of the Failure that the others raise."""
    return asdict(failure_of(error).of_rank(rank(), host()))


def announce_arrival() -> Callable[[], str]:
    """Announces this rank's arrival without waiting. Collective.

    Returns: a function that names the ranks that have not arrived yet; "" once all have.
    """
    if world_size() == 1:
        return lambda: ""
    key = f"ppdist/announced/{next(_barriers)}"
    _arrive(key, _HERE)
    return lambda: _name_absent(key)


def _disable_nagle_once() -> None:
    """Disables Nagle's algorithm on connections to the store, once all ranks are connected."""
    global _nagle_disabled
    if not _nagle_disabled:
        disable_nagle()
        _nagle_disabled = True


def _arrive(key: str, arrival: int) -> None:
    """Marks this rank as arrived, with _HERE or _GAVE; call this only once per key."""
    # The store's only atomic operation is addition, so each rank uses two bits of a sum.
    key_index, shift = divmod(rank(), _RANKS_OF_A_KEY)
    _store().add(f"{key}/here/{key_index}", arrival << 2 * shift)


def _read_arrivals(key: str) -> list[int]:
    """Reads the mark of each rank, see `_arrive`; 0 for a rank that has not arrived."""
    store, arrivals = _store(), []
    for first in range(0, world_size(), _RANKS_OF_A_KEY):
        bits = store.add(f"{key}/here/{first // _RANKS_OF_A_KEY}", 0)
        arrivals += [bits >> 2 * shift & 3 for shift in range(_RANKS_OF_A_KEY)]
    return arrivals[: world_size()]


def _name_absent(key: str) -> str:
    """Names the ranks that have not arrived; "" if all have."""
    hosts_W = addresses() if len(addresses()) == world_size() else ["?"] * world_size()
    ranks = [index for index, arrived in enumerate(_read_arrivals(key)) if not arrived]
    return ranks_named(ranks, hosts_W)


def _leave_store(key: str) -> None:
    """Keeps rank 0, and with it the store, until the others have read.

    Every rank calls this once it has read what it needs.  Rank 0 does not wait long, because a rank
    may have ended.
    """
    store, began = _store(), time.monotonic()
    left = store.add(f"{key}/left", 1)
    while is_main() and left < world_size() and time.monotonic() - began < _LINGER_SECONDS:
        time.sleep(_poll_interval(time.monotonic() - began))
        left = store.add(f"{key}/left", 0)


def _poll_interval(waited: float) -> float:
    """Returns the polling interval of a rank that has waited for `waited` seconds, in seconds."""
    recent_seconds = min(max(waited / 4, _FIRST_POLL_SECONDS), _POLL_SECONDS)
    # The store answers requests one by one, taking 25 to 40 us each.
    busy_store_seconds = world_size() * _REQUEST_SECONDS
    return max(busy_store_seconds, recent_seconds, min(waited / _POLLS, _LONG_POLL_SECONDS))


class _Timeout:
    """The timeout of a waiting rank; signs of life restart it.

    A sign of life from any rank counts.  Waiting ranks give none, so ranks that wait for one
    another time out.
    """

    def __init__(self) -> None:
        self._began = self._since = self._checked = time.monotonic()
        self._signs: int | None = None  # signs of all ranks so far; None: not read yet

    def sleep(self, missing: Callable[[], str]) -> None:
        """Sleeps until the next poll.

        Raises: RankError: the timeout has passed; `missing` says which ranks did not come.
        """
        now = time.monotonic()
        if now - self._checked >= _sign_seconds():
            signs = _store().add(_SIGNS, 0)
            if self._signs is not None and signs != self._signs:
                self._since = now
                # Otherwise fleetrun would end a host whose ranks all wait.
                heartbeat.alive()
            self._checked, self._signs = now, signs
        if now - self._since > _timeout:
            raise RankError(
                f"rank {rank()} waited {_timeout:g} s (distributed.timeout_seconds): {missing()}",
                code="rank_timeout",
            )
        time.sleep(_poll_interval(now - self._began))


def _store() -> Any:
    """Returns the TCP store of all ranks; the first call connects to it."""
    global _reached
    if _reached:
        return paddle_api.global_store()
    endpoint = os.environ.get("PADDLE_MASTER")
    with heartbeat.Waiting("barrier ppdist/store"):
        if endpoint and not is_main():
            # Paddle would wait for the store for 15 minutes, holding the interpreter's lock.
            wait_for_store(endpoint, host(), _timeout)
        store = paddle_api.global_store()
        _reached = True
        disable_nagle()
        _require_same_job(store)
    return store


def _require_same_job(store: Any) -> None:
    """Keeps out ranks of earlier jobs or attempts.

    The store is open to everybody who can reach it, so it holds only a digest of the job.

    Raises: LaunchError: this rank belongs to another job.
    """
    job = hashlib.sha256(os.environ.get(JOB_VARIABLE, "").encode()).hexdigest()
    if is_main():
        store.set("ppdist/job", job)
        store.add("ppdist/job/said", 1)
        return
    timeout = _Timeout()
    while store.add("ppdist/job/said", 0) == 0:
        timeout.sleep(lambda: "rank 0 did not say which job it belongs to")
    if bytes(store.get("ppdist/job")).decode() != job:
        raise LaunchError(
            f"rank {rank()} (host {host()}, process {os.getpid()}) found another job at "
            f"{os.environ.get('PADDLE_MASTER')}: this one was started for a job that has ended, or "
            "PPDIST_JOB_TOKEN is not the same on all hosts",
            code="other_job",
        )


_CONNECT_SECONDS = 10.0  # a lost packet is sent again after 1, 3 and 7
_SILENT_SECONDS = 30.0  # a host that is up answers at once, if only that nothing listens
_START_SECONDS = 300.0  # rank 0 may import Paddle from a cold disk while nothing listens yet
_PAUSE_SECONDS = 0.2
_CALLS_AT_ONCE = 32


def wait_for_store(endpoint: str, local_host: str, timeout: float) -> None:
    """Waits until rank 0's store listens.

    Args:
        endpoint: `ADDRESS:PORT` of the store.
        local_host: name of this host, for the message.
        timeout: longest wait, in seconds.
    Raises: LaunchError: nothing listens at the endpoint.
    """
    address, _, port = endpoint.rpartition(":")
    began = time.monotonic()
    while (problem := _connect(address, int(port))) is not None:
        refused = isinstance(problem, ConnectionRefusedError)
        waited = time.monotonic() - began
        if waited > min(timeout, _START_SECONDS if refused else _SILENT_SECONDS):
            reason = (
                "nothing listens there: see in its log what keeps rank 0"
                if refused
                else "a firewall between the hosts? Open everything between them"
            )
            raise LaunchError(
                f"host {local_host} cannot reach port {port} of {address}, the TCP store of rank 0 "
                f"({problem.strerror or problem}, tried for {waited:.0f} s): {reason}",
                code="store_unreachable",
            )
        time.sleep(_PAUSE_SECONDS)


def require_connectivity(
    all_gather_object: AllGatherObject,
    addresses_W: Sequence[str],
    rank: int,
    environment: Mapping[str, str],
) -> None:
    """Checks that every host reaches every other one.

    The first rank of each host connects to the first rank of every other host, at a port chosen by
    the system, as gloo and NCCL will.  Every rank calls this.

    Args: addresses_W: address of each rank's host.
    Raises: LaunchError, on every rank: a host cannot reach another host.
    """
    hosts = list(dict.fromkeys(addresses_W))
    if len(hosts) < 2:
        return
    local_address = addresses_W[rank]
    is_tester = addresses_W.index(local_address) == rank and not _uses_other_network(environment)
    listener = _listen(local_address, len(hosts)) if is_tester else None
    try:
        ports_W = all_gather_object(listener and listener.getsockname()[1])
        targets = [
            (address, port)
            for address, port in zip(addresses_W, ports_W)
            if is_tester and port and address != local_address
        ]
        with ThreadPoolExecutor(_CALLS_AT_ONCE) as pool:
            problems = pool.map(lambda target: _connect(*target), targets)
        failed = [
            f"{local_address} -> {address} (port {port}: {problem.strerror or problem})"
            for (address, port), problem in zip(targets, problems)
            if problem is not None
        ]
        failed_W = all_gather_object(failed)
    finally:
        if listener is not None:
            listener.close()
    broken_pairs = [pair for failed in failed_W for pair in failed]
    if broken_pairs:
        raise LaunchError(
            f"hosts cannot reach one another: {'; '.join(broken_pairs)}. gloo and NCCL pick their "
            "own ports: open all ports between these hosts in the firewall, and check that "
            f"{interfaces(environment)} is the interface of their network",
            code="hosts_unreachable",
        )


def interfaces(environment: Mapping[str, str]) -> str:
    """Names the interfaces configured for gloo and NCCL, for messages."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return ", ".join(f"{name}={environment.get(name, 'not set')}" for name in names)


def _uses_other_network(environment: Mapping[str, str]) -> bool:
    """Returns True if the user set a different interface for NCCL than for gloo."""
    chosen = environment.get("NCCL_SOCKET_IFNAME", "").lstrip("=")
    on_gpu = environment.get("PADDLE_DISTRI_BACKEND") != "gloo"
    return on_gpu and bool(chosen) and chosen != environment.get("GLOO_SOCKET_IFNAME", chosen)


def _listen(address: str, callers: int) -> socket.socket:
    """Opens a port; no accept call is needed, because the kernel completes connections."""
    try:
        return socket.create_server((address, 0), backlog=callers)
    except OSError:  # an address that only other hosts see, behind NAT
        return socket.create_server(("", 0), backlog=callers)


def _connect(address: str, port: int) -> OSError | None:
    """Tries to connect; returns the error, or None if it succeeds."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        return error
    return None


@contextmanager
def separate_store(members: Sequence[int]) -> Iterator[None]:
    """Creates gloo's groups, inside the block, through a separate store.  Collective.

    Paddle 3.3.1 keeps the addresses of all groups under the same keys (0, 1, ...), so members of a
    second group that arrive before its addresses are written may read those of the first group, and
    fail (`sizeof(impl_) == bytes.size()`, or a refused connection).

    Args: members: ranks of the group; the first one hosts its store.
    """
    first = members[0]
    address, store, port = addresses()[first], paddle_api.group_store(), 0
    if rank() == first:
        (port,) = free_ports(1)
        store = paddle_api.make_store(address, port, True)
    # A rank that calls before the store listens retries after 3 s.
    port = all_gather_object(port)[first]
    if rank() in members[1:]:
        store = paddle_api.make_store(address, port, False)
    with paddle_api.groups_at(store):
        yield


def free_ports(count: int) -> list[int]:
    """Finds ports that are currently free, for a program that opens them itself."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


# Offsets of tcpi_notsent_bytes and tcpi_bytes_sent in struct tcp_info (linux/tcp.h, since 4.19).
_WAITING, _WAITING_AT = struct.Struct("@I"), 144
_SENT, _SENT_AT = struct.Struct("@Q"), 200
_OPEN = Path("/proc/self/fd")


def sent_bytes() -> int | None:
    """Counts the payload bytes sent over this process's open TCP connections.

    gloo and NCCL's socket transport keep their connections open, so the difference between two
    calls is the number of bytes sent in between: gradients, statistics, and messages of the store
    and heartbeats, but no files.  Not counted: shared memory, NVLink, InfiniBand, TCP's own
    headers, and connections that have been closed.  Retransmitted bytes count twice, as they do on
    the wire.

    Returns: None if the kernel does not report it (a system other than Linux, or Linux before
        4.19).
    """
    if not _OPEN.is_dir():
        return None
    total = 0
    for connection in _connections():
        try:
            tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # not a TCP socket
            continue
        if len(tcp_info) < _SENT_AT + _SENT.size:
            return None
        # A collective ends when its last bytes are in the kernel, not when they have been sent.
        total += _WAITING.unpack_from(tcp_info, _WAITING_AT)[0]
        total += _SENT.unpack_from(tcp_info, _SENT_AT)[0]
    return total


def disable_nagle() -> None:
    """Disables Nagle's algorithm on this process's connections.

    Paddle's store sends a request in several small pieces, and the kernel holds back every second
    piece until the first has been acknowledged, which takes the other side 40 ms: an `add` at the
    store takes 44 ms with the algorithm and 0.05 ms without it.
    """
    if not _OPEN.is_dir():
        return
    for connection in _connections():
        with contextlib.suppress(OSError):  # not a TCP socket
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _connections() -> Iterator[socket.socket]:
    """Yields duplicates of this process's stream sockets."""
    for name in os.listdir(_OPEN):
        try:
            if not os.readlink(_OPEN / name).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                    yield connection
        except OSError:  # closed since it was listed
            continue
