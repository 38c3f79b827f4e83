"""Commands, options, keys and figures that our texts name are those of the package."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest

from ppdist.config.migration import table
from ppdist.models.zoo import zoo
from tests.source_tree import REPOSITORY as ROOT
from tests.typed import Refused, Typed, answers, check, heads, key_answers, messages, pages

ROW = re.compile(r"^\| `([^`]+)` \| `([^`:]+)` \|", re.M)


def refusals(typed: Iterable[Typed]) -> tuple[int, list[str]]:
    """How many commands, options and keys there were, and what is wrong with which."""
    tried, wrong = 0, {}
    for each in dict.fromkeys(typed):
        try:
            tried += check(each)
        except (Refused, ValueError) as error:
            wrong[f"{each.place}: {error}"] = None
    return tried, [*wrong]


@pytest.mark.parametrize(
    ("texts", "least"),
    [(pages, 1000), (heads, 100), (messages, 1000), (answers, 300), (key_answers, 50)],
)
def test_what_a_text_types_works(
    texts: Callable[[], Iterable[Typed]], least: int, record_property: Callable[[str, object], None]
) -> None:
    tried, wrong = refusals(texts())
    record_property("tried", tried)
    print(f"{texts.__name__}: {tried} commands, options and keys")
    assert not wrong, "\n".join(wrong)
    assert tried > least


@pytest.mark.parametrize("page", ["from_ultralytics", "from_paddledetection"])
def test_keys_of_other_trainers_are_those_that_messages_name(page: str) -> None:
    rows = ROW.findall((ROOT / f"docs/{page}.md").read_text("utf-8"))
    ours = {name: each.key for name, each in {**table().keys, **table().words}.items() if each.key}
    named = {theirs: key for theirs, key in rows if theirs in ours}
    assert len(named) > 5
    assert named == {theirs: ours[theirs] for theirs in named}


def test_figures_of_models_are_those_of_the_zoo() -> None:
    text = (ROOT / "docs/which_model.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \|", text, re.M)
    assert len(rows) > 5
    published = {name.removesuffix("_coco"): each for name, each in zoo().items()}
    for name, parameters, mean in rows:
        entry = published[name.removesuffix("_auxhead")]
        assert float(parameters) == entry.parameters
        assert float(mean) == entry.published
