"""docs/environment.md names the exit codes and the variables that the source has."""

import re
import signal
from pathlib import Path

from ppdist.common import process
from ppdist.common.json_lines import FORMAT_VARIABLE
from ppdist.common.signals import INTERRUPTED

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
# Names by which programs know their environment; other strings of the source have other beginnings.
NAME = (
    r"(?:PPDIST|PADDLE|FLAGS|DISTRIBUTED|WANDB|MLFLOW|SWANLAB|XDG|POD|OMP|OMPI|PMI|MPI|SLURM|GLOG"
    r"|NCCL|GLOO|CUDA|XPULINK|LOCAL)_\w+|WORLD_SIZE|TMPDIR|DISPLAY|WAYLAND_DISPLAY"
)
# Names of the same form that are no variables which our own code reads or sets.
OTHER_STRINGS = {"WANDB_API_KEY", "WANDB_MODE", "FLAGS_selected_"}


def names_in_source() -> set[str]:
    files = [*(ROOT / "ppdist").rglob("*.py"), *(ROOT / "deploy").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return set(re.findall(rf'"({NAME})"', text)) - OTHER_STRINGS


def test_every_variable_is_on_the_page_and_in_the_source():
    on_page = set(re.findall(rf"`({NAME})`", PAGE)) - OTHER_STRINGS
    assert on_page == names_in_source()
    assert FORMAT_VARIABLE in on_page


def test_exit_codes_are_those_of_the_source():
    rows = re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)
    codes = {0, 1, process.USER_ERROR, process.STOPPED, INTERRUPTED, 128 + signal.SIGPIPE}
    assert {int(code) for code in rows} == codes
