"""The promise: what fails on one rank ends the run on all, with one code, and nobody hangs.

Each row is something that one of two ranks cannot do, before a training or amid it; OUTCOMES has
the code on each rank, and the rank that it is from (None: its own).
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from ppdist.common import files
from ppdist.common.errors import CodedError, ConfigError
from ppdist.data.datasets.synthetic import make_shapes
from ppdist.distributed import comm
from ppdist.engine import auto_batch, build, checkpoint
from ppdist.engine.auto_batch import SearchResult
from ppdist.engine.callbacks import Callback
from ppdist.engine.checkpoint import newest_valid, path_of
from ppdist.engine.continuation import ANEW
from ppdist.engine.distillation import build_distillation
from ppdist.engine.output_dirs import OutputDirs
from ppdist.engine.resume import Start
from tests.distributed import run_on_ranks
from tests.emulated_bfloat16 import EMULATED, with_wrong_gradient
from tests.errors import raises
from tests.faults.fault import parse_faults
from tests.faults.injector import FaultInjector
from tests.unit.engine.runs import build_run
from tests.unit.engine.teachers import distilled_config, write_teacher
from tests.unit.engine.tiny import FASTEST, init_cpu, tiny_config

LATER = "train.batch_size_per_card=2", "checkpoint.every_steps=1", "train.max_steps=3"


def package_is_missing(folder: Path) -> None:
    """Of a tracker, which rank 0 alone starts."""
    with mock.patch.dict(sys.modules, {"tensorboardX": None}):
        build_run(folder / "data", folder / "package", "log.trackers=[tensorboard]", model=FASTEST)


def teacher_is_absent(folder: Path) -> None:
    place = folder / ("absent" if comm.rank() else "teacher")
    config = distilled_config(folder, place)
    build_distillation(config.distill, config.model, build.build_model(config), config.seed)


def kernels_are_wrong(folder: Path) -> None:
    amp = "train.cpu_kernels=auto", "train.amp={enabled: true, dtype: bfloat16}"
    config = tiny_config(folder, amp, "yolov5")
    kernels = with_wrong_gradient() if comm.rank() else EMULATED
    build.check_low_precision(config, build.build_model(config), "", kernels)


def memory_cannot_be_read(folder: Path, name: str = "free_memory") -> None:
    """Where the largest batch is looked for."""
    config = tiny_config(folder, ["train.batch_size_per_card=auto"], FASTEST)

    def fail(*_: object) -> object:
        if comm.rank() == 1:
            raise ConfigError("no room", code="no_room")
        return SearchResult(7, "") if name == "search" else {}

    start = Start(ANEW, None, Path(), OutputDirs(Path()))
    with (
        mock.patch.object(auto_batch, "free_memory", lambda _: {}),
        mock.patch.object(auto_batch, name, fail),
    ):
        auto_batch.resolve_batch_size(config, [SimpleNamespace(labels_M=[])], 10, start)


def another_word_after_resume(folder: Path) -> None:
    word = "elsewhere" if comm.rank() else "auto"
    build_run(folder / "data", folder / "word", model=FASTEST, resume=word)


class FullDisk(FaultInjector):
    """Once step 1 is on disk, no file finds room any more."""

    def __init__(self) -> None:
        super().__init__(parse_faults("disk-full=99@rank0:step3"))

    def on_save(self, step: int) -> None:
        while comm.is_main() and step == 1 and not self.first().exists():
            time.sleep(0.01)

    def first(self) -> Path:
        return path_of(self.output_dir / "checkpoints", 1)


class NoStep(Callback):
    def on_step_begin(self, step: int) -> None:
        raise AssertionError("a step begins on a disk without room")


def no_checkpoint_fits(folder: Path) -> None:
    with mock.patch.object(checkpoint, "free_disk", lambda _: 0):  # that of the rank that writes
        trained(folder / "small", NoStep())


class Lose(Callback):
    """Before step 2, another training has the folder of the rank that writes."""

    def on_train_begin(self, run) -> None:
        self.lock = run.output_dir / "run.lock"

    def on_step_begin(self, step: int) -> None:
        if step == 2 and comm.is_main():
            self.lock.unlink()
            self.lock.write_text("of another")
            with raises("output_dir_lost"):
                files.require_held(self.lock.parent)


def trained(folder: Path, callback: Callback) -> None:
    experiment = build_run(
        folder.parent / "data", folder, *LATER, callbacks=[callback], model=FASTEST
    )
    with experiment.log, mock.patch.object(checkpoint, "_RETRY_SECONDS", ()):
        experiment.trainer.fit()


CASES: dict[str, Callable[[Path], None]] = {
    "a package is missing": package_is_missing,
    "a teacher is absent": teacher_is_absent,
    "kernels compute something else": kernels_are_wrong,
    "free memory cannot be read": memory_cannot_be_read,
    "no batch fits": lambda folder: memory_cannot_be_read(folder, "search"),
    "another word after --resume": another_word_after_resume,
    "no checkpoint fits": no_checkpoint_fits,
    "the last checkpoint is refused": lambda folder: trained(folder / "full", FullDisk()),
    "the folder is lost": lambda folder: trained(folder / "lost", Lose()),
}
OUTCOMES = {
    "a package is missing": ("package_missing", None, "package_missing", 0),
    "a teacher is absent": ("teacher_not_found", 1, "teacher_not_found", None),
    "kernels compute something else": ("amp_self_check", None, "amp_self_check", None),
    "free memory cannot be read": ("no_room", 1, "no_room", None),
    "no batch fits": ("no_room", 1, "no_room", None),
    "another word after --resume": ("ranks_differ", None, "ranks_differ", None),
    "no checkpoint fits": ("disk_full", None, "disk_full", 0),
    "the last checkpoint is refused": ("checkpoint_lost", None, "checkpoint_lost", 0),
    "the folder is lost": ("output_dir_lost", None, "output_dir_lost", 0),
}


def ends(folder: str) -> dict[str, tuple[str, int | None]]:
    """The code and the origin of each row's error on this rank."""
    init_cpu()
    found: dict[str, tuple[str, int | None]] = {}
    for name, work in CASES.items():
        try:
            work(Path(folder))
        except CodedError as error:
            found[name] = error.code, error.from_rank
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failing")
    make_shapes(folder / "data", train=10, val=2, size=64, seed=0)
    write_teacher(folder / "teacher", seen=False)
    return folder


@pytest.fixture(scope="module")
def by_rank(folder: Path) -> list[dict[str, list]]:
    return run_on_ranks(2, f"{__name__}:ends", f"{folder}", seconds=240)


@pytest.mark.parametrize("name", CASES)
def test_what_fails_on_one_rank_ends_all_with_its_code(name, by_rank) -> None:
    assert (*by_rank[0][name], *by_rank[1][name]) == OUTCOMES[name]


def test_what_was_saved_before_stays(folder, by_rank) -> None:
    saved, damaged = newest_valid(folder / "full" / "checkpoints")
    assert saved.state["step"] in (1, 2) and damaged == []  # the second may have found room
    assert not list((folder / "lost").glob("checkpoints/step-0000000[23]"))
