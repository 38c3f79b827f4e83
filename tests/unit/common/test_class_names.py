"""Two lists of classes: matched by name, or refused with both."""

import pytest

from ppdist.common.class_names import match_classes, require_same_classes, tell_apart
from tests.errors import raises


@pytest.mark.parametrize(
    ("ours", "theirs", "places"),
    [
        (("cat", "dog"), ("dog", "cat"), [1, 0]),
        (("Cat ", "dog"), ("dog", "bus", "cat"), [2, 0]),
        (("cat", "tram"), ("cat",), [0, None]),
        (("cat",), ("cat", "CAT"), [0]),
        (("cat",), (), [None]),
    ],
)
def test_places_of_classes_are_those_of_their_names(ours, theirs, places):
    assert match_classes(ours, theirs) == places


@pytest.mark.parametrize(
    ("names", "apart"),
    [(("a", "b"), True), (("a", "A "), False), (("0", "1"), False), (("class 0", "class 1"), False),
     (("class 0", "cat"), True), ((), False)],
)  # fmt: skip
def test_numbers_and_repeated_names_do_not_tell_apart(names, apart):
    assert tell_apart(names) == apart


def test_other_classes_are_refused_with_both_lists():
    place = {"where": "w.npz", "owner": "the data", "fix": "give others"}
    for theirs in (("dog", "cat"), ("class 0", "class 1"), ()):
        require_same_classes(("cat", "dog"), theirs, **place)
    for theirs in (("cat",), ("cat", "bus"), ("cat", "dog", "bus")):
        with raises("classes_differ", "w.npz", "cat, dog", ", ".join(theirs), "the data"):
            require_same_classes(("cat", "dog"), theirs, **place)
