"""Do all ranks hold the same?  Groups of them, and their differences.

What each rank means by the run, what joins it, and its data are compared through the store, which
works before ranks have joined and where the network between them does not.  Only digests are sent;
where they differ, one rank of each kind sends what it has.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ppdist.common.errors import ConfigError
from ppdist.common.files import digest_of_text
from ppdist.distributed.ranks import host, rank, ranks_named
from ppdist.distributed.store import all_gather_object, gather_on_main

Facts = dict[str, str]  # of one rank about one subject: name -> value as a text
_REMEDIES = {
    "start": "give every host the same configuration, command and build of Paddle",
    "command line": "type the same command on every host",
    "versions": "install the same versions on every host",
    "code": "give every host the same files of ppdist and the same script",
    "config": "give every host the same file after -c and the same -o",
}
_MOST_LINES = 20


def equal_ranks(values_W: Sequence[Any]) -> list[list[int]]:
    """Ranks in groups that hold the same value.

    By their first: rank 0 is in the first group.
    """
    groups: list[list[int]] = []
    for of_rank, value in enumerate(values_W):
        group = next((each for each in groups if values_W[each[0]] == value), None)
        if group is None:
            groups.append([of_rank])
        else:
            group.append(of_rank)
    return groups


def require_agreement(subjects: Mapping[str, Facts]) -> None:
    """Compares facts over all ranks, of the same subjects on each.  Collective.

    A rank with another batch size or another loss trains silently wrong, one with another `--eval`
    hangs.

    Args: subjects: by names of `_REMEDIES`.
    Raises: ConfigError, on every rank: they differ; it lists who has which value.
    """
    mine = {
        subject: digest_of_text(json.dumps(facts, sort_keys=True))
        for subject, facts in subjects.items()
    }
    differing = gather_on_main([mine, host()], _differing)
    lines: list[str] = []
    for subject, groups in differing["groups"].items():
        facts, hosts_W = subjects[subject], differing["hosts_W"]
        speaks = any(rank() == group[0] for group in groups)
        facts_W = all_gather_object(facts if speaks else None)
        for group in groups:
            for other in group:
                facts_W[other] = facts_W[group[0]]
        found = list(differences(facts_W, hosts_W))
        lines += [f"  {subject}: {line}" for line in found[:_MOST_LINES]]
        if found[_MOST_LINES:]:
            lines.append(f"  {subject}: and {len(found) - _MOST_LINES} more")
        lines.append(f"    -> {_REMEDIES[subject]}")
    if lines:
        text = "\n".join(lines)
        raise ConfigError(
            f"the ranks differ, so nothing was started:\n{text}",
            code="ranks_differ",
        )


def _differing(told_W: Sequence[Any]) -> dict[str, Any]:
    """Groups of ranks by subjects that differ, and their hosts."""
    groups = {
        subject: equal_ranks([digests[subject] for digests, _ in told_W])
        for subject in told_W[0][0]
    }
    groups = {subject: found for subject, found in groups.items() if len(found) > 1}
    return {"groups": groups, "hosts_W": [of_host for _, of_host in told_W] if groups else []}


def differences(facts_W: Sequence[Facts], hosts_W: Sequence[str]) -> Iterator[str]:
    """A line for each name whose value differs: which rank has which.

    Args: hosts_W: name of the host of each rank.
    """
    for name in sorted({name for facts in facts_W for name in facts}):
        values_W = [facts.get(name, "absent") for facts in facts_W]
        groups = equal_ranks(values_W)
        if len(groups) > 1:
            said = (f"{values_W[ranks[0]]} on {ranks_named(ranks, hosts_W)}" for ranks in groups)
            yield f"{name}: {'; '.join(said)}"
