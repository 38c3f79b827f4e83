"""What is not the same on all ranks, in groups and in words."""

from ppdist.distributed.agreement import differences, equal_ranks
from ppdist.distributed.ranks import ranks_named


def test_equal_ranks_are_grouped_by_their_first() -> None:
    assert equal_ranks([["a", 1], ["b", 1], ["a", 1], None, ["b", 1]]) == [
        [0, 2],
        [1, 4],
        [3],
    ]
    assert equal_ranks(["a"] * 3) == [[0, 1, 2]]


def test_a_difference_names_key_values_ranks_and_hosts() -> None:
    hosts = ["a", "a", "b", "b"]
    facts = [{"x": "1", "y": "2"}] * 2 + [{"x": "3", "y": "2"}, {"x": "3", "y": "2", "z": "4"}]
    assert list(differences(facts, hosts)) == [
        "x: 1 on ranks 0-1 (host a); 3 on ranks 2-3 (host b)",
        "z: absent on ranks 0-1 (host a) and rank 2 (host b); 4 on rank 3 (host b)",
    ]
    assert ranks_named([0, 2, 3], ["a"] * 4) == "ranks 0, 2-3 (host a)"
