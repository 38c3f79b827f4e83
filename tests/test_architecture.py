"""The house of docs/architecture.md, checked: folder arrows, no circle, one seam, quiet imports."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.source_tree import REPOSITORY, name_of, nodes_of, sources, tree_of

PROGRAMS = ("tools", "benchmarks", "tests", "__main__")

# From the bottom up.  A folder may import itself and whatever stands on a lower floor.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("runtime",),
    ("common",),
    ("storage",),
    ("config",),
    ("distributed",),
    ("data", "models"),
    ("cpu", "losses", "metrics", "optim"),
    ("viz",),
    ("engine", "export"),
    ("predict",),
    ("lab", "report"),
    ("api", "cli"),
    PROGRAMS,
)
# Starts before Paddle is there, beside the ranks that it starts: it sees these alone, and is seen
# by programs and the command line alone.
LAUNCHER = "ppdist.launch"
COMMANDS = "ppdist.cli"
BELOW_LAUNCHER = (
    "ppdist.launch", "ppdist.common", "ppdist.distributed.heartbeat",
    "ppdist.runtime.writer_thread",  # a terminal may block, and fleetrun must not
)  # fmt: skip
WITHOUT_PADDLE = (
    "ppdist.cli",
    "ppdist.common",
    "ppdist.config",
    "ppdist.launch",
    "ppdist.lab.planner",
)
SEAM = "ppdist.distributed"  # the only importer of paddle.distributed
PRIVATE_PADDLE = "ppdist.distributed.paddle_api"  # alone names what Paddle does not promise to keep
PADDLES_INSIDE = ("paddle.base", "paddle.framework.core")
# Private attributes that are not Paddle's: of named tuples, of os, of a trial of Optuna.
OTHERS_PRIVATE = {"_replace", "_asdict", "_fields", "_exit", "_trial_id"}
BUILD = "ppdist.engine.build"  # alone sees data, models, losses and optimizer together
# Whatever draws or judges a run.  Up to the engine only those know it that put a run together.
DRAWS = (
    "ppdist.viz", "ppdist.report",
    "ppdist.metrics.analysis", "ppdist.metrics.run", "ppdist.metrics.verdict",
)  # fmt: skip
PUT_TOGETHER = (BUILD, "ppdist.engine.run", "ppdist.export.run")
# What the parts hand to each other: knowing these is not knowing a part.
CONTRACTS = ("ppdist.data.types", "ppdist.models.base", "ppdist.losses.base")


@cache
def imports_of(path: Path, top_level: bool = False) -> list[tuple[int, str]]:
    """(line, dotted name) of what is imported: at any depth, also inside functions, or not."""
    result = []
    for node in tree_of(path).body if top_level else nodes_of(path):
        if isinstance(node, ast.Import):
            result += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            relative = path.parent == REPOSITORY / "ppdist" / "runtime"  # it has two names
            assert (node.level == 1) == relative or node.level == 0, (
                f"{path}:{node.lineno}: write the absolute name"
            )
            module = f"ppdist.runtime.{node.module}" if node.level else node.module
            result += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return result


@cache
def arrows() -> list[tuple[str, str, str]]:
    """(importer, imported module, file:line) for imports of our own modules."""
    result = []
    for module, path in sources().items():
        if module == "ppdist":  # names for users, imported when they are asked for
            continue
        for line, name in imports_of(path):
            if name.split(".")[0] not in ("ppdist", "tools", "tests", "deploy"):
                continue
            target = name if name in sources() else name.rpartition(".")[0]
            result.append((module, target, f"{path.relative_to(REPOSITORY)}:{line}"))
    return result


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def folder(module: str) -> str:
    """The folder of ppdist that it stands in; a program's is that of the repository."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == "ppdist" else first


def floor(module: str) -> int:
    """Its height; 0 is the bottom."""
    for height, folders in enumerate(FLOORS):
        if folder(module) in folders:
            return height
    raise AssertionError(f"{module}: no floor has its folder (FLOORS, tests/test_architecture.py)")


def test_imports_point_down() -> None:
    wrong = []
    for module, target, where in arrows():
        if target == "ppdist":  # its version
            continue
        if inside(module, LAUNCHER):
            allowed = any(inside(target, name) for name in BELOW_LAUNCHER)
        elif folder(module) in PROGRAMS:
            allowed = True
        elif inside(target, LAUNCHER):
            allowed = inside(module, COMMANDS)
        else:
            allowed = folder(module) == folder(target) or floor(target) < floor(module)
        if not allowed:
            wrong.append(f"{where}: {module} imports {target}")
    assert not wrong, "\n".join(wrong)


# Files and lines of ppdist that the imports of a part reach, those inside functions and names like
# "ppdist.x:Class" included.  These are caps: lower them when a part gets lighter.
CARRIES = {
    "ppdist.losses.ppyoloe": (12, 1600),
    "ppdist.losses.yolov5": (12, 1600),
    "ppdist.losses.rtdetr": (12, 1600),
    "ppdist.losses.classification": (7, 500),
    "ppdist.models.ppyoloe": (17, 3100),
    "ppdist.models.yolov5": (16, 2710),
    "ppdist.models.rtdetr": (21, 3900),
    "ppdist.data.image": (7, 1860),
    "ppdist.data.transforms.pipeline": (23, 5860),
    "ppdist.data.loading.loader": (51, 12050),
    "ppdist.engine.train_step": (36, 5800),
    "ppdist.engine.trainer": (73, 12700),
}
NAMED = re.compile(r"(ppdist(?:\.\w+)+)(?::\w+)?")


def reached(module: str) -> set[str]:
    """The modules, with their packages, that a module imports, transitively."""
    done: set[str] = set()
    todo = [module]
    while todo:
        current = todo.pop()
        if current in done or current == "ppdist" or current not in sources():
            continue
        done.add(current)
        names = [name for _, name in imports_of(sources()[current])]
        if not inside(current, "ppdist.config"):  # a Section names its model and loss as text
            texts = [n.value for n in nodes_of(sources()[current]) if isinstance(n, ast.Constant)]
            matches = [NAMED.fullmatch(text) for text in texts if isinstance(text, str)]
            names += [match[1] for match in matches if match]
        for name in names:
            parts = name.split(".")
            todo += [".".join(parts[:end]) for end in range(2, len(parts) + 1)]
    return done


@pytest.mark.parametrize("module", CARRIES)
def test_what_a_part_imports_stays_small(module: str) -> None:
    modules = reached(module)
    lines = sum(len(sources()[name].read_text().splitlines()) for name in modules)
    folders = {folder(name) for name in modules}
    foreign = (
        {"storage", "data", "engine"} - {folder(module)} if folder(module) != "engine" else set()
    )
    assert not folders & (foreign | {"launch"}), sorted(modules)
    most_files, most_lines = CARRIES[module]
    assert len(modules) <= most_files and lines <= most_lines, sorted(modules)


def test_three_steps_of_a_trainer_alone_load_few_modules(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.unit.engine.trainer_alone", str(tmp_path)]
    done = subprocess.run(
        program, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=120
    )
    modules = {name for name in done.stdout.split() if name != "ppdist"}
    few = {"data.types", "losses.base", "metrics.findings", "models.base"}
    parts = ("data", "losses", "metrics", "models")
    of_parts = {name for name in modules if folder(name) in parts and name.count(".") > 1}
    assert of_parts == {f"ppdist.{name}" for name in few}
    assert not {folder(name) for name in modules} & {"cli", "export", "launch", "storage", "viz"}
    assert len(modules) <= 75, modules


@pytest.mark.parametrize("of", ["modules", "folders"])
def test_nothing_imports_itself_in_a_circle(of: str) -> None:
    graph: dict[str, set[str]] = {}
    for module, target, _ in arrows():
        if of == "folders":
            if module == BUILD:  # it puts together all of engine/, its folders too
                continue
            module, target = (place_of(name) for name in (module, target))
            if "ppdist" in (module, target):  # api, and the version
                continue
        if module != target:
            graph.setdefault(module, set()).add(target)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in sorted(graph.get(module, ())):
                visit(target, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def place_of(module: str) -> str:
    """The folder that a module lies in; of a folder's __init__ itself."""
    path = sources().get(module)
    is_folder = path is not None and path.name == "__init__.py"
    return module if is_folder else module.rpartition(".")[0]


def test_the_root_of_the_package_holds_no_loose_modules() -> None:
    loose = {path.stem for path in (REPOSITORY / "ppdist").glob("*.py")}
    assert loose <= {"__init__", "__main__", "api", "cli"}


def test_only_build_imports_all_four_training_parts() -> None:
    parts = {"data", "models", "losses", "optim"}
    seen: dict[str, set[str]] = {}
    for module, target, _ in arrows():
        if target not in CONTRACTS and folder(module) in ("engine", "export"):
            seen.setdefault(module, set()).update(parts & {folder(target)})
    assert {module for module, found in seen.items() if found == parts} <= {BUILD}


def test_the_core_knows_nothing_of_what_draws() -> None:
    wrong = [
        f"{where}: {module} imports {target}"
        for module, target, where in arrows()
        if any(inside(target, name) for name in DRAWS)
        and not any(inside(module, name) for name in DRAWS)
        and floor(module) <= floor("ppdist.engine")
        and module not in PUT_TOGETHER
    ]
    assert not wrong, "\n".join(wrong)


def test_only_models_losses_and_build_know_detectors() -> None:
    # A detector is a name that stands in models/ as well as in losses/.
    models, losses = (
        {name.rpartition(".")[2] for name in sources() if name.startswith(f"ppdist.{part}.")}
        for part in ("models", "losses")
    )
    detectors = {
        f"ppdist.{part}.{name}"
        for part in ("models", "losses")
        for name in models & losses - {"base"}
    }
    wrong = [
        f"{where}: {module} imports {target}"
        for module, target, where in arrows()
        if target in detectors
        and module != BUILD
        and folder(module) not in ("models", "losses")
        and floor(module) < floor("tools")
    ]
    assert not wrong, "\n".join(wrong)


def test_only_distributed_touches_paddle_distributed() -> None:
    wrong = []
    for module, path in sources().items():
        names = [*imports_of(path)]
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute):
                names.append((node.lineno, name_of(node)))
        wrong += [
            f"{path.relative_to(REPOSITORY)}:{line}: {name}"
            for line, name in names
            if inside(name, "paddle.distributed") and not inside(module, SEAM)
        ]
    assert not wrong, "\n".join(wrong)


def test_only_child_starts_programs() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line}"
        for module, path in sources().items()
        for line, name in imports_of(path)
        if inside(module, "ppdist") and module != "ppdist.common.child"
        if inside(name, "subprocess")
    ]
    assert not wrong, "\n".join(wrong)


def test_started_pythons_are_told_where_modules_are() -> None:
    """Only `python` and `python_module` give Python -c or -m; all else is a script by its path."""
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno}: {ast.unparse(node)}"
        for module, path in sources().items()
        for node in nodes_of(path)
        if isinstance(node, ast.List) and node.elts and name_of(node.elts[0]) == "sys.executable"
        if inside(module, "ppdist") and module != "ppdist.common.child"
        if any(isinstance(each, ast.Constant) and each.value != "-u" for each in node.elts[:2])
    ]
    assert not wrong, "\n".join(wrong)


# Methods that write a file by its name; `open` and its like are told by their mode.
WRITES = {
    *("write_text", "write_bytes", "touch", "imwrite", "VideoWriter", "savez"),
    *("copy", "copy2", "copyfile", "copytree", "mkstemp", "NamedTemporaryFile", "truncate"),
}
OPENS = {"open", "fdopen", "ZipFile", "FileIO"}
OF_MODULES = {"shutil", "os", "np", "cv2", "io", "tempfile"}  # of those above with common names
SAVES = {"paddle", "jit", "onnx", "np"}  # their `save` takes a path; so does `save_file`
# Where a file is written otherwise than by common/files.py, and why.
# `MODULE:FUNCTION`, by why it may.
OTHER_WRITERS = {
    "in a folder that this process, or who started it, has just made": {
        *(
            "cli/doctor.py:check_rank",
            "common/child.py:run_command",
            "distributed/heartbeat.py:begin",
        ),
        *("distributed/heartbeat.py:tell_stop", "engine/auto_batch.py:trial"),
        *("engine/checkpoint.py:_write_durably", "engine/memory_probe.py:_measure"),
        *("engine/memory_probe.py:main", "export/export.py:_simplify", "export/onnx.py:sign"),
        *("export/export.py:_write_int8", "export/export.py:_write_onnx"),
        *("export/export.py:_write_paddle", "export/export.py:save_graph"),
        *("export/onnx.py:append_nms", "export/onnx.py:quantize_onnx"),
        *("export/spec.py:write_spec", "launch/supervisor.py:run"),
        *("launch/supervisor.py:run_job", "launch/watchdog.py:_collect_stacks"),
        *("launch/worker.py:end_report", "launch/worker.py:stop"),
        *("lab/verify/dp_equivalence.py:compare_alone", "lab/verify/dp_equivalence.py:judge"),
    },
    "under a new random name": {
        "engine/output_dirs.py:put",
        *("models/unpickle.py:write_pdparams", "models/unpickle.py:write_torch"),
        *("models/weights.py:_write_npz", "models/weights.py:_write_safetensors"),
        *("predict/detections.py:show", "common/keyed_cache.py:put"),
    },
    "exclusively: what has the name already is an error, or was deleted just before": {
        *("data/datasets/annotations.py:write_text", "storage/shards.py:_start_shard"),
        *("storage/shards.py:close", "predict/results.py:write"),
    },
    "to what is open already, to /dev/null, to /proc, or with O_NOFOLLOW": {
        *("common/process.py:flush", "data/cache.py:_take_memory"),
        *("data/cache.py:_open_host_memory", "data/checks/images.py:_serve"),
        "distributed/shm_allreduce.py:join",
        "launch/cli.py:_open_streams",
    },
}


def writers_of(path: Path) -> Iterator[tuple[str, int, str]]:
    """Calls of a module that may write a file by its name: function, line and call."""
    stack: list[tuple[ast.AST, str]] = [(tree_of(path), "")]
    while stack:
        node, function = stack.pop()
        if isinstance(node, ast.FunctionDef):
            function = node.name
        stack += [(child, function) for child in ast.iter_child_nodes(node)]
        if not isinstance(node, ast.Call):
            continue
        of, _, name = name_of(node.func).rpartition(".")
        words = [ast.unparse(each) for each in (*node.args, *(k.value for k in node.keywords))]
        mode = next((w for w in words if re.search(r"^'[rwaxbt+]{1,4}'$|O_WRONLY|O_RDWR", w)), "r")
        opens = name in OPENS and re.search("[wax+]|O_WR|O_RDWR", mode)
        saves = name == "save_file" or (name == "save" and of.rpartition(".")[2] in SAVES)
        common = name in ("copy", "truncate") and of not in OF_MODULES
        if opens or saves or (of and name in WRITES and not common):
            yield function, node.lineno, ast.unparse(node)[:90]


def test_only_files_writes_files() -> None:
    """Whatever writes a file replaces it, or says here why it need not."""
    allowed = set[str]().union(*OTHER_WRITERS.values())
    others: dict[str, list[str]] = {}
    for name, path in sources().items():
        if not inside(name, "ppdist") or name == "ppdist.common.files":
            continue
        for function, line, call in writers_of(path):
            place = path.relative_to(REPOSITORY / "ppdist").as_posix()
            others.setdefault(f"{place}:{function}", []).append(f"{place}:{line}: {call}")
    wrong = [call for place, calls in others.items() if place not in allowed for call in calls]
    assert not wrong, "\n".join(wrong)
    assert others.keys() == allowed  # no reason is left over


def private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Where a module takes a private attribute of something, or a part of Paddle's inside."""
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute):
            if re.match("_[^_]", node.attr):
                yield node.lineno, node.attr
            if node.attr in ("base", "core") and name_of(node) in PADDLES_INSIDE:
                yield node.lineno, name_of(node)


def given_names(path: Path) -> Iterator[str]:
    """What a module defines: functions, classes, variables, attributes of `self` and `cls`."""
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif not isinstance(getattr(node, "ctx", None), ast.Store):
            continue
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and name_of(node.value) in ("self", "cls"):
            yield node.attr


def test_only_paddle_api_touches_private_paddle() -> None:
    modules = {name: path for name, path in sources().items() if inside(name, "ppdist")}
    paddles = {name for _, name in private_names(modules.pop(PRIVATE_PADDLE))}
    assert {"_mean", "_accumulators", "_use_global_stats"} <= paddles
    ours = {name for path in modules.values() for name in given_names(path)}
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line}: {name}"
        for path in modules.values()
        for line, name in private_names(path)
        if name in paddles or name not in ours | OTHERS_PRIVATE
    ]
    wrong += [
        f"{path.relative_to(REPOSITORY)}:{line}: {name}"
        for path in modules.values()
        for line, name in imports_of(path)
        if inside(name, "paddle.base")
    ]
    assert not wrong, "\n".join(wrong)


def test_deploy_and_runtime_import_nothing_of_ours() -> None:
    for path in (REPOSITORY / "deploy").rglob("*.py"):
        for line, name in imports_of(path):
            assert name.split(".")[0] not in ("ppdist", "tools", "tests"), f"{path}:{line}: {name}"
    for path in (REPOSITORY / "ppdist" / "runtime").glob("*.py"):
        for line, name in imports_of(path):
            is_ours = name.startswith("ppdist.") and not name.startswith("ppdist.runtime.")
            assert not is_ours, f"{path}:{line}: {name}"


def test_importing_ppdist_costs_nothing() -> None:
    code = "import sys, ppdist; print(*(each for each in sys.modules if each.split('.')[0] in "
    code += "('numpy', 'cv2', 'pydantic', 'paddle', 'yaml') or each.startswith('ppdist.')))"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == []


def test_files_reach_opencv_by_way_of_the_decoder() -> None:
    allowed = {"ppdist/runtime/decoder.py"}
    calls = re.compile(r"cv2\.(imdecode|imread)")
    found = {
        str(path.relative_to(REPOSITORY))
        for folder in ("ppdist", "deploy")
        for path in (REPOSITORY / folder).rglob("*.py")
        if calls.search(path.read_text(encoding="utf-8"))
    }
    assert found == allowed


def test_what_needs_no_paddle_never_imports_it() -> None:
    ours = [name for name in sources() if any(inside(name, part) for part in WITHOUT_PADDLE)]
    for module in ours:
        for line, name in imports_of(sources()[module]):
            assert not inside(name, "paddle"), f"{sources()[module]}:{line}: {name}"
    ours.append("ppdist.data.datasets.synthetic")  # draws the set of a first try
    code = f"import sys, {', '.join(ours)}; assert 'paddle' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Whole names that say nothing of what they name.
VAGUE = {
    *("each", "found", "told", "said", "own", "both", "there", "theirs", "ours", "then", "whole"),
    *("others", "other", "most", "least", "thing", "things", "why", "noted", "kept", "known"),
    *("away", "these", "them"),
}
# Fields of JSON and YAML that users read.
FIELDS = {"ppdist/lab/verify/zoo.py: why", "ppdist/metrics/run.py: why"}
LEADS = re.compile(
    "(Of|For|As|In|At|By|With|To|From|Whether|Where|When|What|Which|Who|How|Why|If|That|Those|All"
    r"|Both|It|Also|Such|Not|Only)\b"
)


def test_names_say_what_they_name() -> None:
    wrong = []
    for path in sources().values():
        for node in nodes_of(path):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            else:
                continue
            place = path.relative_to(REPOSITORY).as_posix()
            if name in VAGUE and f"{place}: {name}" not in FIELDS:
                wrong.append(f"{place}:{node.lineno}: {name}")
    assert not wrong, "\n".join(wrong)


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    wrong = []
    for path in sources().values():
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                docstring = ast.get_docstring(node) or ""
                if LEADS.match(docstring):
                    place = f"{path.relative_to(REPOSITORY)}:{node.lineno}"
                    wrong.append(f"{place}: {node.name}: {docstring.splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


def test_no_utils_no_star_import_and_no_bare_except() -> None:
    wrong = [str(path) for path in sources().values() if path.stem in ("utils", "util", "misc")]
    for path in sources().values():
        wrong += [
            f"{path}:{line}: {name}" for line, name in imports_of(path) if name.endswith(".*")
        ]
        for node in nodes_of(path):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                wrong.append(f"{path}:{node.lineno}: bare except")
    assert not wrong, "\n".join(wrong)


IMPORT_EVERYTHING = """
import contextlib, importlib, io, logging, os, signal, sys, threading

others, ours = eval(sys.argv[1])
for name in others:  # what they do when imported is not ours
    with contextlib.suppress(ImportError):
        importlib.import_module(name)

def state():
    return {
        "environment": dict(os.environ),
        "root handlers": list(logging.root.handlers),
        "root level": logging.root.level,
        "files": sorted(os.listdir(".")),
        "signal handlers": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
        "threads": threading.active_count(),
        "working directory": os.getcwd(),
    }

report = []
for name in ours:
    before, printed = state(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        importlib.import_module(name)
    after = state()
    report += [f"importing {name} changes: {key}" for key in before if before[key] != after[key]]
    if printed.getvalue():
        report.append(f"importing {name} prints {printed.getvalue()!r}")
print("\\n".join(report))
"""


def test_importing_any_module_has_no_effects(tmp_path: Path) -> None:
    others: set[str] = set()
    for path in sources().values():
        names = [name for _, name in imports_of(path, top_level=True)]
        others.update(name for name in names if name.split(".")[0] not in ("ppdist", "tools"))
    # `from paddle import nn` is recorded as paddle.nn, `from json import dumps` as json.dumps.
    names = sorted(others | {name.rpartition(".")[0] for name in others} - {""})
    ours = [name for name in sources() if inside(name, "ppdist")]
    ended = subprocess.run(
        [sys.executable, "-c", IMPORT_EVERYTHING, repr((names, ours))],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if ended.returncode:
        pytest.fail(ended.stderr)
    assert ended.stdout.splitlines()[-1:] in ([], [""]), ended.stdout


def test_unit_tests_mirror_the_package():
    """tests/unit/a/test_b.py or test_b_aspect.py tests ppdist/a/b.py, so both are easily found."""
    unit = REPOSITORY / "tests" / "unit"
    strangers = []
    for path in sorted(unit.rglob("test_*.py")):
        modules = {
            each.stem
            for each in (REPOSITORY / "ppdist" / path.parent.relative_to(unit)).glob("*.py")
        }
        name = path.stem.removeprefix("test_")
        if not any(name == module or name.startswith(f"{module}_") for module in modules):
            strangers.append(str(path.relative_to(REPOSITORY)))
    assert not strangers


def test_no_test_module_imports_another() -> None:
    # As text: to parse all tests takes three seconds.
    imports = re.compile(r"^\s*(?:from|import) +(tests\.(?:\w+\.)*test_\w+)", re.MULTILINE)
    wrong = []
    for path in sorted((REPOSITORY / "tests").rglob("*.py")):
        own = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        modules = set(imports.findall(path.read_text(encoding="utf-8"))) - {own}
        wrong += [f"{path.relative_to(REPOSITORY)}: {module}" for module in modules]
    assert not wrong, "\n".join(wrong)


# Of data/, where the configuration meets the data, and what writes shards.
KNOW_STORAGE = {"ppdist.data.datasets.build", "ppdist.data.datasets.convert"}


def test_data_is_given_the_opener_of_its_images() -> None:
    knowing = {
        module
        for module, target, _ in arrows()
        if inside(module, "ppdist.data") and inside(target, "ppdist.storage")
    }
    assert knowing == KNOW_STORAGE


def test_policies_know_no_other_and_the_step_knows_none() -> None:
    policies = "ppdist.engine.policies"
    wrong = [
        f"{where}: {module} imports {target}"
        for module, target, where in arrows()
        if inside(target, policies) and inside(module, "ppdist") and module != BUILD
    ]
    assert not wrong, "\n".join(wrong)
