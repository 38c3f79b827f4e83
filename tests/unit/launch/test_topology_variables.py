"""The variables of each rank against those that Paddle's own launcher gives to a script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ppdist.launch.options import parse_options
from ppdist.launch.topology import make_plan
from tests.unit.launch.machines import A, B, machine

SCRIPT = """
import json, os
with open(os.environ["PADDLE_RANK_IN_NODE"] + ".json", "w") as file:
    json.dump(dict(os.environ), file)
"""
# Paddle's launcher on a machine that has other devices than this one.
STOCK = """
import runpy, types
from paddle.distributed.launch.context import device
cuda = {cards}
device.core = types.SimpleNamespace(
    is_compiled_with_cuda=lambda: bool(cuda), get_cuda_device_count=lambda: cuda,
    is_compiled_with_xpu=lambda: False, is_compiled_with_ipu=lambda: False,
)
device.get_all_custom_device_type = lambda: {kinds}
device.get_available_custom_device = lambda: [f"{{kind}}:{{i}}" for kind in {kinds} for i in (0, 1)]
runpy.run_module("paddle.distributed.launch", run_name="__main__", alter_sys=True)
"""
# With the files of Paddle's launcher, from which Paddle takes lists too long for the environment;
# of importing OpenCV; that tell Paddle's processes or ours, and hold a name made up for the host.
APART = {"PADDLE_BACKUP_ENV_PATH", "LD_LIBRARY_PATH", "POD_NAME", "PADDLE_LOG_DIR"}
APART |= {"CUSTOM_DEVICE_ROOT"}  # set by the import of Paddle, in theirs before the ranks start
OURS = ("PPDIST_", "GLOO_", "NCCL_", "GLOG_", "OMP_")


def shown() -> list[dict[str, str]]:
    """What each process of the host had in its environment."""
    every = [json.loads(path.read_text()) for path in sorted(Path().glob("?.json"))]
    assert every and all({"POD_NAME", "PADDLE_LOG_DIR"} <= each.keys() for each in every)
    return [comparable(each) for each in every]


def comparable(variables: dict[str, str]) -> dict[str, str]:
    kept = variables.keys() - APART
    return {name: variables[name] for name in kept if not name.startswith((*OURS, "_"))}


def of_paddle(
    words: list[str], environment: dict[str, str], cards: int = 0, kinds: tuple[str, ...] = ()
) -> list[dict[str, str]]:
    code = STOCK.format(cards=cards, kinds=list(kinds))
    command = [sys.executable, "-c", code, *words, "t.py"]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=100)
    return shown()


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """That of a shell, with a proxy, in a folder with the script."""
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text(SCRIPT)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # make sets it, for the tests
    ours = ("PADDLE_", "FLAGS_", "CUDA_", *OURS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"https_proxy": "http://proxy:1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("typed", "words", "devices", "variables"),
    [
        (f"--ips={A},{B} --nproc_per_node 2", "--nproc_per_node 2", {}, {}),
        (f"--ips={A},{B} --gpus 6,4", "--gpus 6,4", {"cards": 8}, {"CUDA_VISIBLE_DEVICES": "4,6"}),
        (f"--ips={A},{B} --gpus 3", "--gpus 3", {"cards": 4}, {}),
        (f"--ips={A},{B} --devices npu:1,0", "--npus 1,0", {"kinds": ("npu",)}, {}),
        (
            f"--ips={A},{B} --npus 6",
            "--npus 6",
            {"kinds": ("npu",)},
            {"NPU_VISIBLE_DEVICES": "5,6"},
        ),
    ],
    ids=["cpu", "visible gpus", "gpu", "npus", "visible npu"],
)
def test_a_plan_has_the_variables_of_paddles_launcher(
    typed: str, words: str, devices: dict, variables: dict[str, str], environment: dict[str, str]
) -> None:
    environment |= variables
    on = machine(cards=devices.get("cards", 0), own=B)
    options = parse_options([*typed.split(), "--start_port", "7000", "t.py"], environment)
    plan = make_plan(options, environment, on)
    place = ["--ips", f"{A},{B}", "--host", B, "--start_port", "7001"]
    stock = of_paddle([*place, *words.split()], environment, **devices)
    assert [comparable(plan.environment | rank) for rank in plan.ranks] == stock
