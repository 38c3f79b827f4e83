"""Configurations that are small as files and endless as trees: one message."""

import os
import time
from pathlib import Path

import pytest

from ppdist.common.errors import ConfigError
from ppdist.config import yaml
from ppdist.config.yaml import Reader
from tests.errors import raises

SAYS = {
    "too_many_values": r"p.yml:(\d+:\d+: .*:)? more than 100000 values",
    "nested_too_deeply": "p.yml: lists or mappings are nested too deeply",
}


def laughs(levels: int) -> str:
    lines = ["a0: &a0 [" + "x, " * 10 + "]"]
    lines += [f"a{k}: &a{k} [" + f"*a{k - 1}, " * 10 + "]" for k in range(1, levels)]
    return "\n".join(lines) + "\n"


def merges(levels: int) -> str:
    lines = ["a0: &a0 {k: v}"]
    lines += [f"a{k}: &a{k} {{<<: [" + f"*a{k - 1}, " * 10 + "]}" for k in range(1, levels)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (laughs(12), "too_many_values"),
        (merges(12), "too_many_values"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested_too_deeply"),
        ("a: " + "{a: " * 5000 + "}" * 5000, "nested_too_deeply"),
        ("- " * 5000, "nested_too_deeply"),
    ],
)
def test_a_file_that_grows_without_end_is_one_message(
    text: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.yml").write_text(text)
    with pytest.raises(ConfigError, match=SAYS[code]) as caught:
        Reader().read_file("p.yml")
    assert caught.value.code == code


def test_values_are_counted_as_they_are_read(tmp_path, monkeypatch) -> None:
    """16 MiB of them took minutes before they were counted."""
    monkeypatch.setattr(yaml, "_MAX_VALUES", 100)
    file = tmp_path / "p.yml"
    for lines, code in ((99, None), (99_000, "too_many_values")):
        file.write_text("".join(f"k{n}: 1\n" for n in range(lines)))
        began = time.process_time()
        if code is None:
            Reader().read_file(str(file))
            continue
        with raises(code):
            Reader().read_file(str(file))
        assert time.process_time() - began < 1  # all of them take 4 s


def test_pipes_devices_and_huge_files_are_no_config(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yml")
    with (tmp_path / "large.yml").open("wb") as file:
        file.truncate(1 << 40)  # it takes up no room
    for base, says in (
        ("/dev/zero", "/dev/zero: cannot be read: not a file"),
        ("pipe.yml", "pipe.yml: cannot be read: not a file"),
        ("large.yml", "large.yml: cannot be read: too large: 1099511627776 bytes"),
    ):
        (tmp_path / "p.yml").write_text(f"_BASE_: {base}\n")
        with pytest.raises(ConfigError, match=says) as caught:
            Reader().read_file(str(tmp_path / "p.yml"))
        assert caught.value.code == "config_unreadable"


@pytest.mark.parametrize("text", ["9" * 100_000, "0x" + "9" * 100_000, "-" + "1" * 5000])
def test_a_number_of_many_digits_is_a_value_and_no_crash(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.yml").write_text(f"a: {text}\nb: 17\nc: 0x11\n")
    tree = Reader().read_file(str(tmp_path / "p.yml"))
    assert isinstance(tree.value["a"].value, float | str)
    assert tree.value["b"].value == tree.value["c"].value == 17


def test_a_yaml_tag_is_a_problem_and_never_an_object(tmp_path: Path) -> None:
    for value in (
        f"!!python/object/apply:os.system [touch {tmp_path / 'made'}]",
        f"!!python/object/apply:os.mkdir {{path: {tmp_path / 'made'}}}",
        "!!python/name:os.system x",
        "!x y",
    ):
        (tmp_path / "p.yml").write_text(f"a: {value}\n")
        reader = Reader()
        reader.read_file(str(tmp_path / "p.yml"))
        assert {problem.code for problem in reader.problems} == {"unknown_tag"}
    assert not (tmp_path / "made").exists()
