"""What no module may call, because content of files or of the network could become code by it."""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from ppdist.common.process import printable
from tests.source_tree import REPOSITORY, name_of, nodes_of, sources

# Names that run what they read, or put files where their content says.
FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "importlib.import_module", "runpy.run_path",
    "os.system", "os.popen", "pty.spawn", "subprocess.getoutput", "subprocess.getstatusoutput",
    "pickle.load", "pickle.loads", "pickle.Unpickler", "cPickle.load", "cPickle.loads",
    "dill.load", "dill.loads", "joblib.load", "cloudpickle.load", "cloudpickle.loads",
    "marshal.load", "marshal.loads", "shelve.open", "pandas.read_pickle",
    "multiprocessing.get_context", "multiprocessing.Pipe", "multiprocessing.Queue",
    "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.UnsafeLoader",
    "yaml.Loader", "yaml.FullLoader",
    "paddle.load", "paddle.jit.load", "paddle.framework.load", "torch.load", "torch.jit.load",
    "paddle.distributed.all_gather_object", "paddle.distributed.broadcast_object_list",
    "paddle.distributed.scatter_object_list",
    "tarfile.open", "shutil.unpack_archive", "tempfile.mktemp",
    "urllib.request.urlopen", "urllib.request.urlretrieve", "requests.get",
}  # fmt: skip
FORBIDDEN_METHODS = {"extractall", "extract", "allow_pickle", "all_gather_object"}
# (module, name): why it is safe there.
ALLOWED = {
    ("ppdist.cli", "importlib.import_module"): "a name of its own table",
    ("ppdist", "importlib.import_module"): "a name of its own table",
    ("ppdist.runtime.predictor", "importlib.import_module"): "one of two runtimes",
    ("ppdist.predict.sources", "urllib.request.urlopen"): "http(s) as typed, an image, bounded",
    ("ppdist.engine.end_hook", "urllib.request.urlopen"): "the address of log.on_end, a POST",
    ("ppdist.common.trackers", "importlib.import_module"): "of our table, or named by the user",
    ("ppdist.common.trackers", "pickle.load"): "from the run that started it, over its stdin",
    (
        "ppdist.common.plugin",
        "importlib.import_module",
    ): "what the user names; never of the current folder",
    ("ppdist.common.writers", "runpy.run_path"): "a file of the installed package VisualDL",
    ("ppdist.data.loading.loader", "pickle.loads"): "from its own children, over a socket pair",
    (
        "ppdist.storage.shards",
        "tarfile.open",
    ): "to write: shards are read by offset, never unpacked",
    ("ppdist.data.datasets.annotations", "yaml.load"): "with a subclass of SafeLoader",
}


def dotted(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Local names of what a module imports -> what they stand for."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def calls(nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.Call, str]]:
    """Every call, with the full name of what is called as far as imports tell."""
    known = dotted(nodes)
    for node in nodes:
        if isinstance(node, ast.Call):
            first, _, rest = name_of(node.func).partition(".")
            name = known.get(first, first)
            yield node, f"{name}.{rest}" if rest else name


def dangers() -> list[tuple[str, str, str]]:
    """(module, what, file:line)"""
    found = []
    for module, path in sources().items():
        for node, name in calls(nodes_of(path)):
            where = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
            owner, _, method = name.rpartition(".")
            foreign = owner and not name.startswith("ppdist.")  # our all_gather_object is JSON
            if name in FORBIDDEN or (foreign and method in FORBIDDEN_METHODS):
                found.append((module, name, where))
            for keyword in node.keywords:
                value = keyword.value
                off = isinstance(value, ast.Constant) and not value.value
                if keyword.arg in ("shell", "allow_pickle") and not off:
                    found.append((module, f"{keyword.arg}={ast.unparse(value)}", where))
    return found


def test_nothing_that_is_read_can_become_code() -> None:
    wrong = [
        f"{where}: {name}" for module, name, where in dangers() if (module, name) not in ALLOWED
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_every_exception_is_still_needed() -> None:
    assert {(module, name) for module, name, _ in dangers()} == set(ALLOWED)


@pytest.mark.parametrize(
    "line",
    [
        "import pickle as p\np.loads(x)",
        "from torch import load\nload(f)",
        "import paddle\npaddle.load('a')",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import subprocess\nsubprocess.run(c, shell=True)",
        "import yaml\nyaml.load(t, Loader=yaml.Loader)",
        "zipfile.ZipFile(f).extractall()",
        "import paddle.distributed as d\nd.all_gather_object(found, x)",
        "from paddle.distributed import all_gather_object\nall_gather_object(found, x)",
    ],
)
def test_the_search_finds_what_it_looks_for(line: str, monkeypatch, tmp_path: Path) -> None:
    path = REPOSITORY / "ppdist" / "made_up.py"
    monkeypatch.setattr("tests.integration.test_security.sources", lambda: {"ppdist.made_up": path})
    monkeypatch.setattr(
        "tests.integration.test_security.nodes_of", lambda path: tuple(ast.walk(ast.parse(line)))
    )
    assert dangers()


@pytest.mark.slow
def test_listening_sockets_match_documented_table() -> None:
    found = {
        module
        for module, path in sources().items()
        for node, name in calls(nodes_of(path))
        if name == "socket.create_server"
        or (name.endswith(".listen") and "socket" in dotted(nodes_of(path)))
    }
    assert found == {
        "ppdist.launch.connection",
        "ppdist.launch.supervisor",
        "ppdist.distributed.store",
    }


def test_names_are_shown_without_what_moves_a_cursor() -> None:
    assert printable("a\x1b[31mb\rc\x9b\u202e\u2066d\te\nf ä 苹") == (
        "a\\u001b[31mb\\u000dc\\u009b\\u202e\\u2066d\te\nf ä 苹"
    )


def test_what_is_pinned_is_named_in_the_documentation() -> None:
    """docs/security.md has a row for each requirement of setup.py."""
    tree = ast.parse((REPOSITORY / "setup.py").read_text(encoding="utf-8"))
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    page = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8")
    bound = re.compile(r"[\w-]+[<>=]=?[\d.<>=,]+")
    required = [word for word in words if isinstance(word, str) and bound.fullmatch(word)]
    assert len(required) > 10
    assert [word for word in required if f"`{word}`" not in page] == []
