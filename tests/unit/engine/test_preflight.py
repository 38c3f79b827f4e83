"""Preflight: ranks that do not mean the same run are refused, and told where they differ."""

import json
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ppdist.common import retry
from ppdist.common.errors import UserError
from ppdist.common.job import (
    JOB_DIR_VARIABLE,
    MIN_HOSTS_VARIABLE,
    PER_HOST_KEYS,
    RUN_NOTE,
    write_note,
)
from ppdist.config.distributed import DistributedConfig
from ppdist.config.parse import flattened
from ppdist.data.datasets.build import read_split
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import comm, device
from ppdist.distributed.agreement import require_agreement
from ppdist.engine import preflight as module
from ppdist.engine.data import require_same_data
from ppdist.engine.preflight import check_shares, flat_config, preflight, within
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.forked import clean_environment, end, start
from tests.unit.engine.tiny import init_cpu, tiny_config

HOST = socket.gethostname()
CHANGES = {  # of data, see write_changed_data, and what is said of each
    "box": ".jpg: boxes: [[", "class": "the classes are", "fewer": "4 and 3 images",
    "renamed": "other.jpg", "pixels": "different content", "longer": " bytes and ",
}  # fmt: skip


def test_handshake_compares_all_but_per_host_keys(tmp_path: Path) -> None:
    one = flat_config(tiny_config(tmp_path, ["output_dir=a", "data.workers=0"]))
    other = flat_config(tiny_config(tmp_path, ["output_dir=b", "data.workers=3"]))
    assert one == other and "train.amp.enabled" in one and "data.cache" in one
    assert flattened(tiny_config(tmp_path)).keys() >= set(PER_HOST_KEYS)


@pytest.mark.parametrize("file", ["w.npz", "checkpoints/best/manifest.json"])
def test_weights_are_compared_by_content_not_path(file: str, tmp_path: Path) -> None:
    facts = []
    for name, content in (("a", "1"), ("b", "1"), ("c", "2")):
        place = tmp_path / name / file
        place.parent.mkdir(parents=True)
        place.write_text(content)
        given = place if file == "w.npz" else tmp_path / name  # of a run its best checkpoint
        facts.append(flat_config(tiny_config(tmp_path, [f"model.pretrained={given}"])))
    assert facts[0] == facts[1] != facts[2]
    none = flat_config(tiny_config(tmp_path))
    assert none.keys() != facts[0].keys()  # one rank with weights, one without


def test_new_run_keeps_weights_it_starts_from(tmp_path: Path) -> None:
    best, elsewhere = tmp_path / "checkpoints" / "best", tmp_path / "other.npz"
    step = best.parent / "step-00000004"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    best.symlink_to(step.name)
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    for place in (tmp_path, best, step, step / "ema.safetensors", link):
        config = tiny_config(tmp_path, [f"model.pretrained={place}"])
        with raises("out_holds_source", "model.pretrained"):
            module.keep_sources(config, tmp_path)
        module.keep_sources(config, tmp_path / "fine")
    taught = tiny_config(tmp_path, [f"distill={{teacher: {tmp_path}, logits: {{}}}}"])
    with raises("out_holds_source", "distill.teacher"):
        module.keep_sources(taught, tmp_path)
    for config in (tiny_config(tmp_path), tiny_config(tmp_path, [f"model.pretrained={elsewhere}"])):
        module.keep_sources(config, tmp_path)


def attempt(work: Callable[[], Any]) -> str:
    """What the user hears."""
    try:
        return f"agreed: {work()}"
    except UserError as error:
        return str(error)


def on_two_ranks(folder: str) -> dict[str, str]:
    """Several differences between two ranks, one after the other; all of them are told of each."""
    texts = {"devices": attempt(lambda: init_with(device, "choose", lambda wanted: "gpu"))}
    other = DistributedConfig(bucket_mb=8 if comm.rank() else 25)
    texts["joining"] = attempt(lambda: comm.init("cpu", other))
    init_cpu()
    facts = {"a": "1", "b": "2"} if comm.rank() else {"b": "2", "a": "1"}
    texts["order"] = attempt(lambda: require_agreement({"versions": facts}))
    texts |= differing_runs(Path(folder)) | differing_data(Path(folder))
    return texts


def init_with(owner: Any, name: str, replacement: Any) -> None:
    """Joins, while on rank 1 something is replaced."""
    on_rank_1(owner, name, replacement, init_cpu)


def on_rank_1(owner: Any, name: str, replacement: Any, work: Callable[[], Any]) -> Any:
    real = getattr(owner, name)
    if comm.rank() == 1:
        setattr(owner, name, replacement)
    try:
        return work()
    finally:
        setattr(owner, name, real)


def differing_runs(folder: Path) -> dict[str, str]:
    second = comm.rank() == 1
    code, versions, add = module.digests_of_code(), module.versions(), comm.all_reduce_sum

    def look(overrides: Sequence[str] = (), evaluate: bool = False) -> list[str]:
        config = tiny_config(folder, overrides)
        return preflight(config, evaluate=evaluate)

    def replaced(name: str, value: Any, owner: Any = module) -> str:
        return attempt(lambda: on_rank_1(owner, name, value, look))

    changed = ["train.epochs=11", "output_dir=elsewhere"] if second else []
    began = time.monotonic()
    texts = {"same": attempt(look), "seconds": f"{time.monotonic() - began}"}
    texts["config"] = attempt(lambda: look(changed))
    texts["command line"] = attempt(lambda: look(evaluate=second))
    other = code | {"ppdist/losses/boxes.py": "0", "ppdist/x.py": "1"}
    texts["code"] = replaced("digests_of_code", lambda: other)
    texts["versions"] = replaced("versions", lambda: versions | {"paddle": "3.0.0"})
    texts["sum"] = replaced("all_reduce_sum", lambda tensor: add(tensor) + 1, comm)
    return texts


def differing_data(folder: Path) -> dict[str, str]:
    def look(name: str) -> None:
        root = folder / (name if comm.rank() else "same")
        config = tiny_config(folder, [f"data.root={root}"])
        require_same_data(read_split(config.data, "train", 3), config.data)

    return {f"data: {name}": attempt(partial(look, name)) for name in ("same", *CHANGES)}


def write_changed_data(folder: Path) -> None:
    """`same` of four images, and beside it copies with one change each, named after it."""
    make_shapes(folder / "same", train=4, val=1, size=64)
    file = Path("annotations/instances_train.json")
    for name in CHANGES:
        shutil.copytree(folder / "same", folder / name)
        tree = json.loads((folder / "same" / file).read_text())
        if name == "box":
            tree["annotations"][0]["bbox"][2] -= 1
        elif name == "class":
            tree["categories"][0]["name"] = "other"
        elif name == "fewer":
            last = tree["images"].pop()["id"]
            tree["annotations"] = [one for one in tree["annotations"] if one["image_id"] != last]
        elif name in ("pixels", "longer"):
            image = folder / name / "images" / tree["images"][2]["file_name"]
            content = image.read_bytes()
            image.write_bytes(content[:-1] + (b"?" if name == "pixels" else b"??"))
        else:
            image, images = tree["images"][1], folder / name / "images"
            (images / image["file_name"]).rename(images / "train" / "other.jpg")
            image["file_name"] = "train/other.jpg"
        (folder / name / file).write_text(json.dumps(tree))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each of two ranks was told of each difference."""
    folder = tmp_path_factory.mktemp("ranks")
    write_changed_data(folder)
    return run_on_ranks(2, "tests.unit.engine.test_preflight:on_two_ranks", str(folder))


@pytest.mark.slow
def test_ranks_that_agree_start_within_five_seconds(told: list[dict[str, str]]) -> None:
    for texts in told:
        assert texts["same"].startswith("agreed") and texts["data: same"].startswith("agreed")
        assert float(texts["seconds"]) < 5


HERE = f"(host {HOST})"
DIFFERENCES = {
    "devices": [f"device: cpu on rank 0 {HERE}; gpu on rank 1 {HERE}\n"],
    "joining": [f"distributed.bucket_mb: 25 on rank 0 {HERE}; 8 on rank 1"],
    "config": [f"train.epochs: 10.0 on rank 0 {HERE}; 11.0"],
    "command line": [f"--eval: False on rank 0 {HERE}; True"],
    "code": ["code: ppdist/losses/boxes.py: ", "ppdist/x.py: absent"],
    "versions": ["3.0.0 on rank 1"],
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_each_difference_is_refused_on_every_rank(name: str, told: list[dict[str, str]]) -> None:
    first, second = (texts[name] for texts in told)
    assert first == second and all(fact in first for fact in DIFFERENCES[name])


def test_a_wrong_sum_is_refused_on_every_rank(told: list[dict[str, str]]) -> None:
    assert all("4 instead of 3" in texts["sum"] for texts in told)


@pytest.mark.parametrize(("name", "fact"), CHANGES.items())
def test_data_that_differ_are_named_by_image_and_column(
    name: str, fact: str, told: list[dict[str, str]]
) -> None:
    for texts in told:
        text = texts[f"data: {name}"]
        assert fact in text
        assert name not in ("pixels", "longer") or f"rank 0 {HERE} and rank 1" in text


def test_fact_order_is_ignored_script_is_compared(
    told: list[dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [texts["order"] for texts in told] == ["agreed: None"] * 2
    script = tmp_path / "mine.py"
    found = []
    for content in ("1", "2"):
        script.write_text(content)
        monkeypatch.setattr(sys, "argv", [str(script)])
        found.append(module.digests_of_code())
    assert found[0].keys() == found[1].keys() and found[0]["mine.py"] != found[1]["mine.py"]


def hang() -> None:
    with within(0.2, "the first all-reduce"):
        time.sleep(30)


def test_a_paddle_that_was_not_run_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def warned() -> list[str]:
        config = tiny_config(tmp_path)
        return preflight(config, evaluate=False)

    assert warned() == []
    monkeypatch.setattr(module.paddle, "__version__", "3.4.0")
    (warning,) = warned()
    assert "not with 3.4.0" in warning


def test_hung_call_ends_process_with_reason(tmp_path: Path) -> None:
    process = start(hang, (), clean_environment(), tmp_path / "out", tmp_path / "err")
    process.join(60)
    code = process.exitcode
    end(process)
    assert code == 1
    said = (tmp_path / "err").read_text()
    assert "within 0.2 s" in said
    assert "NCCL_SOCKET_IFNAME=" in said and f"on host {HOST}" in said


def test_a_call_that_comes_back_leaves_no_clock_behind() -> None:
    before = threading.active_count()
    with within(60, "nothing"):  # of less, a busy machine ends this process
        assert threading.active_count() == before + 1
    until = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_restart_waits_for_what_was_read_before(tmp_path, monkeypatch, caplog):
    make_shapes(tmp_path, train=2, val=1, size=64, seed=0)
    weights = tmp_path / "weights.pdparams"
    config = tiny_config(tmp_path, [f"model.pretrained={weights}"])
    annotations, away = tmp_path / "annotations", tmp_path / "away"
    module.wait_for_inputs(config, evaluate=True, anew=False)  # a checkpoint has its own weights
    annotations.rename(away)
    with raises("storage_unreachable", "instances_train"):  # this host has never read it
        module.wait_for_inputs(config, evaluate=True, anew=False)
    monkeypatch.setenv(JOB_DIR_VARIABLE, str(tmp_path))
    write_note(RUN_NOTE, {"id": "the run"})

    def mount(seconds: float) -> None:
        if away.exists():
            away.rename(annotations)
        else:
            weights.touch()

    monkeypatch.setattr(time, "sleep", mount)
    monkeypatch.setattr(retry, "_FIRST_PAUSE_SECONDS", 1.0)
    caplog.clear()
    module.wait_for_inputs(config, evaluate=True, anew=True)
    assert weights.exists() and annotations.exists()
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1


def test_plugins_are_compared_before_they_are_imported(tmp_path, monkeypatch):
    """A package, imported or not, and one that is a single file."""
    package = tmp_path / "plugged_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit")
    (package / "part.py").write_text("")
    (tmp_path / "plugged_file.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["json", "plugged_file", "plugged_package", "plugged_nowhere"]
    monkeypatch.setattr(module.plugins, "packages", lambda: names)
    found = module.digests_of_code()
    wanted = {"json/__init__.py", "plugged_file.py", "plugged_package/__init__.py"}
    assert wanted | {"plugged_package/part.py"} <= found.keys()
    (tmp_path / "plugged_file.py").write_text("# other")
    assert module.digests_of_code()["plugged_file.py"] != found["plugged_file.py"]
    assert not {"plugged_file", "plugged_package"} & sys.modules.keys()


def test_shares_of_other_ranks_are_refused(monkeypatch):
    with raises("shares_of_other_world", "distributed.shares: 3 "):
        check_shares(DistributedConfig(shares=(2, 2, 1)))  # one rank
    check_shares(DistributedConfig(shares=(1.0,)))
    monkeypatch.setenv(MIN_HOSTS_VARIABLE, "1")
    with raises("shares_of_one_world"):
        check_shares(DistributedConfig(shares=(1.0,)))
