"""Errors have codes, and no program decides by the words of a message."""

import ast
import json
import pickle
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ppdist.common import job, process
from ppdist.common.errors import (
    ConfigError,
    DataError,
    Failure,
    LaunchError,
    RankError,
    UserError,
    failure_of,
)
from tests.source_tree import REPOSITORY as ROOT
from tests.source_tree import nodes_of, sources, tree_of
from tools.docs import Site, error_table, find_sites

# Here an error is made of what has its code already: of a file, or of another process.
_PASSED_ON = {
    "ppdist/common/errors.py",
    "ppdist/config/yaml.py",
    "ppdist/data/datasets/annotations.py",
    "ppdist/data/datasets/layout.py",
    "ppdist/data/checks/clean_copy.py",
    "ppdist/data/image.py",
    "ppdist/data/loading/loader.py",
    "ppdist/data/transforms/pipeline.py",
    "ppdist/data/checks/before_training.py",
    "ppdist/predict/sources.py",
}
# The only function that reads texts, of other programs.
_FOREIGN = ("ppdist/common/errors.py", "_has_sign")
_COMPARE = ("startswith", "endswith", "search", "match", "fullmatch", "find", "index", "count")


@pytest.fixture(scope="module")
def found() -> list[Site]:
    return find_sites({str(path.relative_to(ROOT)): tree_of(path) for path in sources().values()})


def test_every_user_error_has_snake_case_code(found: list[Site]) -> None:
    for site in found:
        assert site.codes or site.path in _PASSED_ON, f"{site.path}:{site.line} has no literal code"
        for code in site.codes:
            assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", code), f"{site.path}:{site.line}"


def reads_an_error(node: ast.AST) -> bool:
    """`str(error)`, `f"{error}"`, `error.args`, `failure.message` and the like."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("str", "repr"):
        return any(is_error(argument) for argument in node.args)
    if isinstance(node, ast.FormattedValue):
        return is_error(node.value)
    if isinstance(node, ast.Attribute) and node.attr in ("args", "message", "closed"):
        return True
    return isinstance(node, ast.Attribute) and node.attr == "strerror"


def is_error(node: ast.AST) -> bool:
    name = getattr(node, "id", getattr(node, "attr", ""))
    return name in ("error", "failure", "exception", "problem", "caught", "refused", "e")


def decisions(nodes: Sequence[ast.AST]) -> Iterator[tuple[int, ast.AST]]:
    """Comparisons that look into a text: the line and the function they are in."""
    found = [node for node in nodes if decides(node)]
    for function in nodes if found else ():
        if isinstance(function, ast.FunctionDef):
            inside = set(ast.walk(function))
            yield from ((node.lineno, function) for node in found if node in inside)


def decides(node: ast.AST) -> bool:
    """Whether it compares the text of an error."""
    looked_at: list[ast.AST] = []
    if isinstance(node, ast.Compare):
        contains = any(isinstance(each, (ast.In, ast.NotIn)) for each in node.ops)
        words = [node.left, *node.comparators]
        texts = [each for each in words if isinstance(each, ast.Constant) and each.value]
        if contains or any(isinstance(each.value, str) for each in texts):
            looked_at = words
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _COMPARE:
        looked_at = [*ast.iter_child_nodes(node.func), *node.args]
    return any(reads_an_error(part) for each in looked_at for part in ast.walk(each))


def test_no_program_decides_by_a_sentence() -> None:
    found = {
        f"{path}:{line}"
        for path in sources().values()
        for line, function in decisions(nodes_of(path))
        if (str(path.relative_to(ROOT)), function.name) != _FOREIGN
    }
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        'if "no room" in str(error): pass',
        'if error.args[0] == "no room": pass',
        "if PATTERN.search(self.message): pass",
        'if f"{error}".startswith("no"): pass',
        'if (call.closed or "").startswith("it does not speak"): pass',
    ],
)
def test_a_decision_by_a_sentence_is_found(line: str) -> None:
    assert list(decisions(tuple(ast.walk(ast.parse(f"def decide():\n    {line}")))))


def test_the_text_is_where_what_and_fix() -> None:
    assert str(UserError("what", code="a_b")) == "what"
    whole = UserError("what", code="a_b", where="where", fix="fix")
    assert str(whole) == "where: what; fix"
    again = pickle.loads(pickle.dumps(failure_of(whole).of_rank(1, "a").error()))
    assert (type(again), again.code, again.from_rank) == (UserError, "a_b", 1)
    assert str(again).endswith(f": {whole}")


def raised(error: BaseException, first: BaseException | None = None) -> BaseException:
    """The error, as it is after another one was met."""
    try:
        try:
            raise first or error
        except BaseException as met:
            if met is error:
                raise
            raise error from met
    except BaseException as end:
        return end


GLOO = RuntimeError("[gloo/transport/tcp/pair.cc:584] Connection closed by peer [10.0.0.2]:51432")


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (ConfigError("x", code="invalid_config"), "config", "invalid_config"),
        (RankError("x", code="rank_timeout"), "rank", "rank_timeout"),
        (GLOO, "rank", "lost_rank"),
        (RuntimeError("ncclRemoteError: a call failed"), "rank", "lost_rank"),
        (raised(KeyError("x"), GLOO), "rank", "lost_rank"),
        (raised(KeyError("x"), RankError("y", code="rank_timeout")), "rank", "rank_timeout"),
        (raised(LaunchError("x", code="rank_timeout"), GLOO), "launch", "rank_timeout"),
        (raised(KeyError("x"), ConfigError("y", code="invalid_config")), "crash", "crash"),
        (MemoryError(), "crash", "out_of_memory"),
        (OSError("(External) CUDNN_STATUS_ALLOC_FAILED"), "crash", "out_of_memory"),
        (ZeroDivisionError("division by zero"), "crash", "crash"),
    ],
)
def test_an_exception_is_classified(error: BaseException, kind: str, code: str) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.code, failure.from_rank) == (kind, code, None)


def test_other_ranks_receive_kind_code_and_origin() -> None:
    wrong = failure_of(ConfigError("x", code="invalid_config")).of_rank(3, "a").error()
    assert (type(wrong), wrong.code, wrong.from_rank) == (ConfigError, "invalid_config", 3)
    # Told on once more, it stays the failure of the rank that it was.
    assert failure_of(wrong).of_rank(0, "b").from_rank == 3
    bug = failure_of(KeyError("x")).of_rank(3, "a").error()
    assert (type(bug), bug.code, bug.from_rank) == (RankError, "rank_failed", 3)


@pytest.mark.parametrize(
    ("error", "exit_code", "failure"),
    [
        (ConfigError("y", code="invalid_config", where="x"), 2, ("config", "invalid_config")),
        (RankError("y", code="lost_rank"), 1, ("rank", "lost_rank")),
        (ZeroDivisionError("y"), 1, ("crash", "crash")),
        (ModuleNotFoundError("no paddle", name="paddle"), 2, ("user", "paddle_missing")),
    ],
)
def test_a_rank_leaves_why_it_ended(
    error: Exception,
    exit_code: int,
    failure: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(job.EXIT_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    monkeypatch.setattr(process, "STOP_SIGNALS", ())

    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        process.run(main)
    said = json.loads((tmp_path / "rank-1.json").read_text(encoding="utf-8"))
    assert ended.value.code == said.pop("exit_code") == exit_code and said.pop("rank") == 1
    assert 0 <= process.boot_seconds() - said.pop("time") < 60
    assert said.pop("printed")
    left = Failure(**said)
    assert (left.kind, left.code) == failure
    assert left.message.startswith("Traceback") == (exit_code == 1)


@pytest.mark.parametrize("code", ["lost_rank", "rank_failed"])
def test_of_a_lost_host_fleetrun_speaks_where_the_job_goes_on(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv(job.EXIT_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setenv(job.MIN_HOSTS_VARIABLE, "1")
    monkeypatch.setattr(process, "STOP_SIGNALS", ())

    def main() -> None:
        raise RankError("y", code=code)

    with pytest.raises(SystemExit):
        process.run(main)
    said = json.loads((tmp_path / "rank-0.json").read_text(encoding="utf-8"))
    assert said["printed"] == ("Traceback" in capsys.readouterr().err) == (code != "lost_rank")


def test_the_page_of_codes_is_up_to_date(found: list[Site]) -> None:
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    assert page == error_table(found), "run `make docs`"


def test_the_words_of_the_data_are_in_the_printed_text() -> None:
    error = DataError("bad", code="bad_box", fix="`ppdist data check DATA --fix DIR` copies it")
    assert process.describe_end(error)[1].message == str(error)
    error.data_words = ("-c", "my set.yml")
    assert "check -c 'my set.yml' --fix" in process.describe_end(error)[1].message
