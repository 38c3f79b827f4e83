"""The structure of docs/architecture.md, checked: arrows, one seam, quiet imports."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# From the top down, by the name under ppdist (tools stands beside it).  A module may import its own
# layer and those below; a new one needs a place here, and a package stands for all its modules.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("tools", "benchmarks", "tests"),
    ("cli",),
    (
        "benchmark",
        "ensemble",
        "link_speed",
        "plan",
        "plots",
        "run_report",
        "tune",
        "search",
        "verify",
    ),
    (
        "arguments",
        "classification",
        "export",
        "export_check",
        "export_graph",
        "infer_spec",
        "inference",
        "onnx_nms",
        "pictures",
        "predictions",
        "quantize",
        "runtime",
        "sample_accuracy",
        "samples",
    ),
    ("engine",),
    ("optim", "metrics", "checkpoint", "checkpoint_writer"),
    ("losses", "postprocess"),
    ("models",),
    ("data",),
    ("boxes", "drawing", "lettering"),
    (
        "closing",
        "curves",
        "dist",
        "dist_config",
        "heap",
        "host_memory",
        "joining",
        "log",
        "meetings",
        "message_size",
        "outlets",
        "points",
        "run_records",
        "tensorboard_file",
        "time_left",
        "visualdl_file",
        "wire",
    ),
    (
        "config",
        "config_messages",
        "config_schema",
        "config_yaml",
        "errors",
        "files",
        "own_keys",
        "pulse",
        "run_lock",
        "__version__",
    ),
)
OURS = ("ppdist", "tools", "benchmarks", "tests")
# launch starts before Paddle is there and apart from the run that it starts.
LAUNCH = "ppdist.launch"
BELOW_LAUNCH = ("ppdist.launch", "ppdist.errors", "ppdist.own_keys", "ppdist.pulse")
UPWARD = {
    # Whoever reads a file has to know the tree of all sections; imported inside load_config, so
    # that importing ppdist.config stays light.
    ("ppdist.config", "ppdist.engine.experiment_config"),
}
EXPERIMENT = "ppdist.engine.experiment"
CONFIG_TREE = "ppdist.engine.experiment_config"
# What the parts hand to each other: knowing these is not knowing a part.
CONTRACTS = ("ppdist.data.sample", "ppdist.models.detector", "ppdist.losses")
SEAM = "ppdist.dist"  # the only importer of paddle.distributed
WITHOUT_PADDLE = ("ppdist.config", "ppdist.errors", "ppdist.own_keys", "ppdist.plan", LAUNCH)


@cache
def sources() -> dict[str, Path]:
    """Every module of ppdist, tools and benchmarks by its dotted name."""
    found = {}
    folders = [REPOSITORY / name for name in ("ppdist", "tools", "benchmarks")]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports_of(path: Path, body: ast.AST | None = None) -> list[tuple[int, str]]:
    """(line, dotted name) of everything imported at any depth, also inside functions."""
    result = []
    for node in ast.walk(body or tree_of(path)):
        if isinstance(node, ast.Import):
            result += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the absolute name"
            result += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return result


def arrows() -> list[tuple[str, str, str]]:
    """(importer, imported module, file:line) for imports of our own modules."""
    result = []
    for module, path in sources().items():
        for line, name in imports_of(path):
            if name.split(".")[0] not in (*OURS, "deploy"):
                continue
            target = name if name in sources() else name.rpartition(".")[0]
            result.append((module, target, f"{path.relative_to(REPOSITORY)}:{line}"))
    return result


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> int:
    """Its height; 0 is the bottom."""
    first, _, rest = module.partition(".")
    name = rest.partition(".")[0] or "__version__" if first == "ppdist" else first
    name = "tools" if name == "launch" else name  # of which only tools know
    for depth, names in enumerate(LAYERS):
        if name in names:
            return len(LAYERS) - 1 - depth
    raise AssertionError(f"{module} has no place in LAYERS (tests/test_architecture.py)")


def test_imports_point_down() -> None:
    wrong = []
    for module, target, where in arrows():
        if inside(module, LAUNCH):
            allowed = any(inside(target, name) for name in BELOW_LAUNCH)
        elif inside(target, LAUNCH):
            allowed = inside(module, "tools") or module == "ppdist.cli"
        else:
            allowed = layer(target) <= layer(module) or (module, target) in UPWARD
        if not allowed:
            wrong.append(f"{where}: {module} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_every_exception_to_the_arrows_is_still_needed() -> None:
    assert {(module, target) for module, target, _ in arrows()} >= UPWARD


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, target, _ in arrows():
        if module != target and (module, target) not in UPWARD:
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


def test_only_the_experiment_sees_data_models_losses_and_optim_together() -> None:
    parts = {"ppdist.data", "ppdist.models", "ppdist.losses", "ppdist.optim"}
    seen: dict[str, set[str]] = {}
    for module, target, _ in arrows():
        if target not in CONTRACTS and layer(module) <= layer("ppdist.engine"):
            seen.setdefault(module, set()).update(part for part in parts if inside(target, part))
    assert {module for module, found in seen.items() if found == parts} <= {EXPERIMENT, CONFIG_TREE}


def test_nothing_but_the_table_of_the_experiment_knows_which_detectors_there_are() -> None:
    # A detector is a name that stands in models/ as well as in losses/.
    models, losses = (
        {name.rpartition(".")[2] for name in sources() if name.startswith(f"ppdist.{part}.")}
        for part in ("models", "losses")
    )
    detectors = {
        f"ppdist.{part}.{name}" for part in ("models", "losses") for name in models & losses
    }
    wrong = [
        f"{where}: {module} imports {target}"
        for module, target, where in arrows()
        if target in detectors
        and not any(inside(module, name) for name in (EXPERIMENT, CONFIG_TREE))
        and layer(module) > layer("ppdist.losses")
    ]
    assert not wrong, "\n".join(wrong)


def test_only_dist_touches_paddle_distributed() -> None:
    wrong = []
    for module, path in sources().items():
        names = imports_of(path)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute):
                names.append((node.lineno, ast.unparse(node)))
        wrong += [
            f"{path.relative_to(REPOSITORY)}:{line}: {name}"
            for line, name in names
            if inside(name, "paddle.distributed") and module != SEAM
        ]
    assert not wrong, "\n".join(wrong)


def test_deploy_imports_nothing_of_ours() -> None:
    for path in (REPOSITORY / "deploy").rglob("*.py"):
        for line, name in imports_of(path):
            assert name.split(".")[0] not in OURS, f"{path}:{line}: {name}"


def test_launch_plan_config_and_errors_never_import_paddle() -> None:
    ours = [name for name in sources() if any(inside(name, part) for part in WITHOUT_PADDLE)]
    for module in ours:
        for line, name in imports_of(sources()[module]):
            assert not inside(name, "paddle"), f"{sources()[module]}:{line}: {name}"
    code = f"import sys, {', '.join(ours)}; assert 'paddle' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_there_is_no_utils_no_star_import_and_no_bare_except() -> None:
    wrong = [str(path) for path in sources().values() if path.stem in ("utils", "util", "misc")]
    for path in sources().values():
        wrong += [
            f"{path}:{line}: {name}" for line, name in imports_of(path) if name.endswith(".*")
        ]
        for node in ast.walk(tree_of(path)):
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
        top_level = ast.Module(
            [node for node in tree_of(path).body if isinstance(node, ast.Import | ast.ImportFrom)],
            [],
        )
        names = [name for _, name in imports_of(path, top_level)]
        others.update(name for name in names if name.split(".")[0] not in OURS)
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
