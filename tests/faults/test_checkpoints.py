"""Damage to the checkpoints of a job that has died: it goes on from what is whole."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.scenario import FaultScenario, first_difference

pytestmark = pytest.mark.slow


def flip_a_byte(folder: Path) -> None:
    file = folder / "step-00000008" / "optimizer.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(folder: Path) -> None:
    file = folder / "step-00000008" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


def lose_the_links(folder: Path) -> None:
    (folder / "last").unlink()


def leave_a_draft(folder: Path) -> None:
    shutil.copytree(folder / "step-00000008", folder / ".step-00000012.1")
    (folder / ".step-00000012.1" / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "goes_on_at"),
    [(flip_a_byte, 5), (cut_short, 5), (lose_the_links, 9), (leave_a_draft, 9)],
)
def test_the_newest_whole_checkpoint_is_found(
    damage: Callable[[Path], None],
    goes_on_at: int,
    scenario: FaultScenario,
    undisturbed: Path,
    record_property,
) -> None:
    name = damage.__name__
    died = scenario.run(name, "kill@rank0:step11")
    assert died.process.returncode == 1, died.text
    damage(died.output_dir / "checkpoints")
    job = scenario.run(name, train=["--resume"])
    assert job.process.returncode == 0, job.text
    assert job.steps[0] == goes_on_at
    assert first_difference(undisturbed, job.output_dir) == ""
    assert not list((job.output_dir / "checkpoints").glob(".step-*"))
    record_property("figure", f"goes on from step {goes_on_at - 1} by itself")
