"""Agreement of all ranks: compares their values, and lists the differences.

The configuration, the way of joining and the data of each rank are compared through the store,
which works before ranks have joined and where the network between them does not.  Only digests are
sent; where they differ, one rank of each group sends its values.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ppdist.common.errors import ConfigError
from ppdist.common.files import digest_of_text
from ppdist.distributed.ranks import host, rank, ranks_named
from ppdist.distributed.store import all_gather_object, gather_on_main

Facts = dict[str, str]  # one rank's values for one subject: name -> value as text
_REMEDIES = {
    "start": "give every host the same configuration, command and build of Paddle",
    "command line": "type the same command on every host",
    "versions": "install the same versions on every host",
    "code": "give every host the same files of ppdist and the same script",
    "config": "give every host the same file after -c and the same -o",
}
_MOST_LINES = 20


def equal_ranks(values_W: Sequence[Any]) -> list[list[int]]:
    """Groups the ranks that hold the same value; rank 0 is in the first group."""
    groups: list[list[int]] = []
    for rank_index, value in enumerate(values_W):
        group = next((members for members in groups if values_W[members[0]] == value), None)
        if group is None:
            groups.append([rank_index])
        else:
            group.append(rank_index)
    return groups


def require_agreement(subjects: Mapping[str, Facts]) -> None:
    """Checks that facts about the same subjects agree on all ranks.  Collective.

    A rank with a different batch size or loss would silently train wrongly, and one with a
    different `--eval` would hang.

    Args: subjects: facts by subject; the subjects are the keys of `_REMEDIES`.
    Raises: ConfigError, on every rank: the facts differ; it lists which ranks have which value.
    """
    digests = {
        subject: digest_of_text(json.dumps(facts, sort_keys=True))
        for subject, facts in subjects.items()
    }
    differing = gather_on_main([digests, host()], _group_differing)
    lines: list[str] = []
    for subject, groups in differing["groups"].items():
        facts, hosts_W = subjects[subject], differing["hosts_W"]
        sends_facts = any(rank() == group[0] for group in groups)
        facts_W = all_gather_object(facts if sends_facts else None)
        for group in groups:
            for member in group:
                facts_W[member] = facts_W[group[0]]
        lines_of_subject = list(differences(facts_W, hosts_W))
        lines += [f"  {subject}: {line}" for line in lines_of_subject[:_MOST_LINES]]
        if lines_of_subject[_MOST_LINES:]:
            lines.append(f"  {subject}: and {len(lines_of_subject) - _MOST_LINES} more")
        lines.append(f"    -> {_REMEDIES[subject]}")
    if lines:
        text = "\n".join(lines)
        raise ConfigError(
            f"the ranks differ, so nothing was started:\n{text}",
            code="ranks_differ",
        )


def _group_differing(reports_W: Sequence[Any]) -> dict[str, Any]:
    """Groups the ranks by value for each subject that differs, and names their hosts."""
    groups = {
        subject: equal_ranks([digests[subject] for digests, _ in reports_W])
        for subject in reports_W[0][0]
    }
    groups = {subject: ranks for subject, ranks in groups.items() if len(ranks) > 1}
    return {"groups": groups, "hosts_W": [name for _, name in reports_W] if groups else []}


def differences(facts_W: Sequence[Facts], hosts_W: Sequence[str]) -> Iterator[str]:
    """Returns a line for each name whose value differs: which ranks have which value.

    Args: hosts_W: host name of each rank.
    """
    for name in sorted({name for facts in facts_W for name in facts}):
        values_W = [facts.get(name, "absent") for facts in facts_W]
        groups = equal_ranks(values_W)
        if len(groups) > 1:
            values = (f"{values_W[ranks[0]]} on {ranks_named(ranks, hosts_W)}" for ranks in groups)
            yield f"{name}: {'; '.join(values)}"
