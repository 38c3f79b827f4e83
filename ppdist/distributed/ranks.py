"""Ranks of this run: their number, the rank of this process, their hosts.

Everything here is read from the variables that the launcher sets; nothing communicates.
"""

import os
import socket
from collections.abc import Sequence

from ppdist.common.job import launched_rank, launched_ranks

# This process is one of world_size(), with rank() in [0, world_size).
rank, world_size = launched_rank, launched_ranks


def local_size() -> int:
    """Returns the number of ranks on this host; 1 without a launcher."""
    return int(os.environ.get("PADDLE_LOCAL_SIZE", "1"))


def local_rank() -> int:
    """Returns the rank within this host; 0 without a launcher."""
    return int(os.environ.get("PADDLE_LOCAL_RANK", "0"))


def is_main() -> bool:
    """Returns True on rank 0.  Never run a collective only if this is True: see `run_on_main`."""
    return rank() == 0


def host() -> str:
    """Returns the name of this host, for messages."""
    address = os.environ.get("PADDLE_CURRENT_ENDPOINT", "").rpartition(":")[0]
    several = len(set(addresses())) > 1
    return f"{socket.gethostname()} {address}" if several else socket.gethostname()


def addresses() -> list[str]:
    """Returns the address of each rank's host; [""] without a launcher."""
    endpoints = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "").split(",")
    return [endpoint.rpartition(":")[0] for endpoint in endpoints]


def ranks_named(ranks: Sequence[int], hosts_W: Sequence[str]) -> str:
    """Names ranks with their hosts: `ranks 0-1 (host a) and rank 4 (host b)`.

    Args: hosts_W: host name of each rank.
    """
    ranks_by_host: dict[str, list[int]] = {}
    for number in ranks:
        ranks_by_host.setdefault(hosts_W[number], []).append(number)
    return " and ".join(
        f"rank{'s' * (len(members) > 1)} {_format_ranges(members)} (host {name})"
        for name, members in ranks_by_host.items()
    )


def _format_ranges(numbers: Sequence[int]) -> str:
    """Writes ascending numbers as ranges: `0-3, 6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)
