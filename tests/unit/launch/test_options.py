"""The command line of fleetrun, every form of it."""

import pytest

from ppdist.common.errors import LaunchError
from ppdist.launch.options import STALE_VARIABLES, parse_options
from tests.errors import raises

SCRIPT = ["tools/train.py", "-c", "cfg.yml"]


@pytest.mark.parametrize("name", ["--selected_gpus", "--selected_gpu", "--gpus", "--devices"])
@pytest.mark.parametrize("form", ["spaced", "equals"])
@pytest.mark.parametrize("value", ["0-7", "0,1", "0", "0-3,6", "0, 1", "'0,1'", '"0-3"'])
def test_every_name_form_and_list_of_cards_is_understood(name: str, form: str, value: str) -> None:
    typed = [name, value] if form == "spaced" else [f"{name}={value}"]
    options = parse_options([*typed, *SCRIPT], {})
    assert options.cards == value.strip("'\"")
    assert options.script == "tools/train.py"
    assert options.script_arguments == ("-c", "cfg.yml")


@pytest.mark.parametrize(
    ("typed", "backend", "kind", "cards"),
    [
        (["--devices", "0-3"], "", "gpu", "0-3"),
        (["--devices", "0-3"], "npu", "npu", "0-3"),
        (["--devices", "gpu:0-3"], "npu", "gpu", "0-3"),
        (["--devices=testcard:0,", "1"], "", "testcard", "0,1"),
        (["--npus", "0-7"], "", "npu", "0-7"),
        (["--xpus=0"], "npu", "xpu", "0"),
        ([], "npu", "npu", None),
    ],
)
def test_the_kind_of_cards_is_typed_or_in_the_environment(
    typed: list[str], backend: str, kind: str, cards: str | None
) -> None:
    options = parse_options([*typed, *SCRIPT], {"PADDLE_XCCL_BACKEND": backend})
    assert (options.kind, options.cards) == (kind, cards)


def test_everything_after_the_script_is_the_scripts() -> None:
    words = ["--nproc_per_node", "9", "--selected_gpus=3", "--", "--help"]
    options = parse_options(["--nproc_per_node", "2", "t.py", *words], {})
    assert options.processes == 2 and options.cards is None
    assert options.script_arguments == tuple(words)


@pytest.mark.parametrize(
    ("script", "trains"),
    [
        ("ppdist train -c cfg.yml", True),
        ("/opt/venv/bin/ppdist train -c cfg.yml", True),
        ("tools/train.py -c cfg.yml", True),
        ("/opt/venv/bin/ppdist eval -c cfg.yml", False),
        ("train.py train", False),
    ],
)
def test_a_training_is_known_however_its_script_is_typed(script: str, trains: bool) -> None:
    assert parse_options(script.split(), {}).trains == trains


def test_options_of_paddles_launcher_pass_through_with_master() -> None:
    typed = ["--master", "a:2379", "--nnodes", "2", "t.py"]
    options = parse_options(typed, {"PADDLE_JOB_ID": "x"})
    assert options.passed == {"nnodes": "2", "job_id": "x"}


WITHOUT = "option_without_effect"


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        ("--nnodes 2", WITHOUT),
        ("--rejoin_seconds 5 --ips A,B", WITHOUT),
        ("--nnodes 2:3", WITHOUT),
        ("--nnodes 3 --ips A,B", WITHOUT),
        ("--nnodes 2 --ips A,B", None),
        ("--nnodes 1 --rank 0 --job_id x", None),
        ("--rank 1", WITHOUT),
        ("--rank 1 --nnodes 2 --master A:7000", None),
        *((f"--{name} x", "option_refused") for name in ("legacy", "servers", "gloo_port")),
        *((f"--{name} x", "option_refused") for name in ("elastic_level", "sort_ip", "node_rank")),
    ],
)
def test_options_without_effect_are_refused(typed: str, code: str | None) -> None:
    variables = dict(word.split("=") for word in typed.split() if "=" in word)
    words = [word for word in typed.split() if "=" not in word]
    if code is None:
        assert parse_options([*words, *SCRIPT], variables).script == SCRIPT[0]
        return
    with raises(code, typed.split()[0]):
        parse_options([*words, *SCRIPT], variables)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["--nproc_per_nod", "2", "t.py"], "did you mean --nproc_per_node?"),
        (["--eval", "t.py"], "unknown option --eval before the script"),
        (["--legacy", "1", "t.py"], "leave the option out"),
        (["--selected_gpus"], "--selected_gpus needs a value, e.g. --selected_gpus 0-3,6"),
        (["--ips", "--nproc_per_node", "2", "t.py"], "--ips needs a value"),
        (["--gpus", "0", "--devices=1", "t.py"], "is already given as '0'; give it once"),
        (["--devices", "cpu:0", "t.py"], "cards 'cpu:0': 'cpu' is not a kind of card"),
        (["--devices", "npu:0,npu:1", "t.py"], "expected a list such as 0-3 or npu:0-3"),
        (["--nproc_per_node", "two", "t.py"], "--nproc_per_node two: expected a whole number"),
        (["--nproc_per_node", "0", "t.py"], "expected a whole number from 1"),
        (["--start_port", "80", "t.py"], "--start_port 80: expected a whole number from 1024"),
        (["--log_overwrite", "1", "t.py"], "give another --log_dir"),
        (["--preemption_file", "gone", "t.py"], "send SIGUSR1 to fleetrun"),
        ([], "no script was given"),
        (["--nproc_per_node", "2"], "no script was given"),
    ],
)
def test_a_wrong_command_line_is_one_clear_message(typed: list[str], says: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_options(typed, {})
    assert says in str(caught.value)


@pytest.mark.parametrize("name", STALE_VARIABLES)
def test_a_variable_left_over_is_refused_by_name(name: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_options(SCRIPT, {name: "10.0.0.9:6070", "HOME": "/root"})
    assert f"{name}='10.0.0.9:6070'" in str(caught.value)
    assert f"env -u {name} fleetrun" in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "environment", "port"),
    [
        ([], {}, None),
        ([], {"PADDLE_START_PORT": "7100"}, 7100),
        ([], {"FLAGS_START_PORT": "7000"}, 7000),
        ([], {"FLAGS_START_PORT": "7000", "PADDLE_START_PORT": "7100"}, 7000),
        (["--start_port", "7200"], {"FLAGS_START_PORT": "7000"}, 7200),
        (["--start_port=7200"], {"PADDLE_START_PORT": "7100"}, 7200),
    ],
)
def test_the_port_comes_from_option_or_variable(
    typed: list[str], environment: dict[str, str], port: int | None
) -> None:
    assert parse_options([*typed, *SCRIPT], environment).start_port == port
