"""Which hosts write a run's files, and what they know of each other's."""

from pathlib import Path

import pytest

from ppdist.distributed import comm
from ppdist.engine.output_dirs import OutputDirs, find_output_dirs
from tests.errors import raises


@pytest.fixture
def second_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """This rank is the only one of the second host of two."""
    monkeypatch.setattr(comm, "is_main", lambda: False)
    monkeypatch.setattr(comm, "world_size", lambda: 2)
    monkeypatch.setattr(comm, "addresses", lambda: ["10.0.0.1", "10.0.0.2"])
    monkeypatch.setattr(comm, "all_gather_object", lambda value: [(None, "a"), value])


def test_on_one_host_nothing_is_asked(tmp_path: Path) -> None:
    assert find_output_dirs(tmp_path) == OutputDirs(tmp_path)


@pytest.mark.parametrize("together", [True, False])
def test_a_file_of_rank_0_tells_whether_hosts_share_a_folder(
    together: bool, second_host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before output_dir is made, in the folder above."""
    (tmp_path / "a").mkdir()
    own = tmp_path / "a" / "run"
    theirs = own if together else tmp_path / "a" / "other"

    def put(work) -> object:  # as on rank 0, whose folder it is
        (theirs.parent / ".ppdist-1").touch()
        return ".ppdist-1", theirs.name

    monkeypatch.setattr(comm, "run_on_main", put)
    monkeypatch.setattr(comm, "all_gather_object", lambda value: [True, value])
    assert find_output_dirs(own) == OutputDirs(own, together)
    assert not own.exists()


def test_hosts_note_where_the_checkpoints_are(second_host: None, tmp_path: Path) -> None:
    dirs = OutputDirs(tmp_path / "run", shared=False)
    dirs.require_no_other()
    dirs.note_newest(40)
    with raises("checkpoint_elsewhere", "step 40", "10.0.0.1"):
        dirs.require_no_other()
    dirs.forget()
    dirs.require_no_other()


def test_who_has_checkpoints_notes_nothing(second_host: None, tmp_path: Path) -> None:
    OutputDirs(tmp_path, shared=True).note_newest(40)
    assert [*tmp_path.iterdir()] == []
