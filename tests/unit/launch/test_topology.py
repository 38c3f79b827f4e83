"""What ranks, or Paddle's launcher, are given on a made-up machine."""

from pathlib import Path

import pytest

from ppdist.launch import network
from ppdist.launch.cards import (
    Card,
    deal_out,
    expand_ids,
    parse_nvidia_smi,
    split_cards,
    visible_labels,
)
from ppdist.launch.options import parse_options
from ppdist.launch.topology import LaunchPlan, Machine, make_plan
from tests.errors import raises
from tests.unit.launch.machines import A, B, machine


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.py").write_text("")


def plan(command: str, on: Machine, **environment: str) -> LaunchPlan:
    return make_plan(parse_options([*command.split(), "t.py"], environment), environment, on)


def given(made: LaunchPlan, option: str) -> str | None:
    """To Paddle's launcher."""
    return made.paddle_options.get(option)


def told(made: LaunchPlan, name: str) -> str:
    """Values of a variable of all ranks of the host."""
    return " ".join(rank.get(name, "-") for rank in made.ranks)


@pytest.mark.parametrize("name", ["--selected_gpus", "--selected_gpu", "--gpus", "--devices"])
@pytest.mark.parametrize(
    ("value", "cards"),
    [
        ("0-7", "0,1,2,3,4,5,6,7"),
        ("0,1", "0,1"),
        ("0-3,6", "0,1,2,3,6"),
        ("7", "7"),
        ("5,2", "5,2"),
    ],
)
def test_with_cards_every_form_becomes_devices(name: str, value: str, cards: str) -> None:
    for typed in (f"{name} {value}", f"{name}={value}"):
        made = plan(typed, machine(cards=8))
        assert told(made, "FLAGS_selected_gpus") == cards.replace(",", " ")
        assert made.device == "gpu" and ",".join(made.gpus) == cards
        assert made.processes == len(made.ranks) == len(cards.split(","))
        assert "PADDLE_DISTRI_BACKEND" not in made.ranks[0] and not made.paddle_options
        assert "OMP_NUM_THREADS" not in made.environment


def test_by_default_every_card_is_used() -> None:
    assert plan("", machine(cards=4)).gpus == ("0", "1", "2", "3")
    assert plan("--nproc_per_node 2", machine(cards=4)).gpus == ("0", "1")


def test_without_cards_processes_share_the_cores() -> None:
    made = plan("--nproc_per_node 2", machine())
    assert (made.device, told(made, "PADDLE_DISTRI_BACKEND")) == ("cpu", "gloo gloo")
    assert told(made, "FLAGS_selected_gpus") == "- -"
    assert made.environment["OMP_NUM_THREADS"] == "4"
    assert plan("", machine()).processes == 1
    assert plan("--nproc_per_node 99", machine()).environment["OMP_NUM_THREADS"] == "1"
    kept = plan("--nproc_per_node 2", machine(), OMP_NUM_THREADS="3")
    assert kept.environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("typed", "fix"),
    [
        ("tools/train.py", "ppdist train"),
        ("../clone/tools/infer.py", "ppdist predict"),
        ("train", "ppdist train"),
        ("mine/train.py", ""),
        ("nothing", ""),
    ],
)
def test_a_script_of_a_clone_is_a_command_elsewhere(typed: str, fix: str) -> None:
    with raises("script_not_found", fix) as caught:
        plan(typed, machine())
    assert bool(fix) is ("write `fleetrun" in str(caught.value))


def test_card_ids_physical_and_in_visible_devices() -> None:
    made = plan("--selected_gpus 4,5", machine(cards=8), CUDA_VISIBLE_DEVICES="4, 5")
    assert (made.gpus, told(made, "FLAGS_selected_gpus")) == (("4", "5"), "0 1")
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "4,5"  # Paddle does not strip spaces
    assert plan("", machine(cards=8), CUDA_VISIBLE_DEVICES="6,2").gpus == ("6", "2")
    one = plan("--gpus 2", machine(cards=8), CUDA_VISIBLE_DEVICES="6,2")
    assert (one.gpus, told(one, "FLAGS_selected_gpus")) == (("2",), "1")


def test_empty_cuda_visible_devices_means_cpu() -> None:
    made = plan("--nproc_per_node 3", machine(cards=8), CUDA_VISIBLE_DEVICES="")
    assert (made.processes, told(made, "PADDLE_DISTRI_BACKEND")) == (3, "gloo gloo gloo")
    assert made.environment["CUDA_VISIBLE_DEVICES"] == ""
    # Paddle's launcher reads "" as one card and fails for 3 processes; the worker hides them again.
    many = f"--master {A}:33000 --nproc_per_node 3"
    made = plan(many, machine(cards=8), CUDA_VISIBLE_DEVICES="")
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert made.environment["PPDIST_CPU"] == "1" and given(made, "--nproc_per_node") == "3"


@pytest.mark.parametrize(
    ("variable", "labels"),
    [
        (None, ["0", "1", "2", "3"]),
        ("all", ["0", "1", "2", "3"]),
        ("3,1", ["3", "1"]),
        ("1,-1,2", ["1"]),
        ("-1", []),
        ("GPU-2", ["2"]),
        ("MIG-abc", ["MIG-abc"]),
    ],
)
def test_visible_cards_are_those_cuda_would_show(variable: str | None, labels: list[str]) -> None:
    assert visible_labels(machine(cards=4).cards, variable) == labels


def test_a_cpu_build_beside_cards_is_pointed_out() -> None:
    made = plan("--nproc_per_node 2", machine(cards=8, build="cpu"))
    assert (made.device, made.processes) == ("cpu", 2)
    assert "no card is used" in made.description


IPS = f"--ips={A},{B}"
EIGHT = {"cards": 8}
NPU = {"PADDLE_XCCL_BACKEND": "npu"}
# What is typed, on which machine, with which variables -> the error and what it names.
REFUSED = [
    ("--selected_gpus 0,1", {}, {}, "no_cards", "type: fleetrun --nproc_per_node 2 t.py"),
    ("--selected_gpu=0-1", {}, {}, "no_cards", "type: fleetrun --nproc_per_node 2 t.py"),
    ("--gpus 0,1 ppdist train -c", {}, {}, "no_cards", "--nproc_per_node 2 ppdist train -c t.py"),
    (f"{IPS} --gpus 0-7", {}, {}, "no_cards", f"fleetrun --ips {A},{B} --nproc_per_node 8"),
    ("--gpus 0", EIGHT, {"CUDA_VISIBLE_DEVICES": ""}, "no_cards", "CUDA_VISIBLE_DEVICES=''"),
    ("--npus 0", {}, {**NPU, "NPU_VISIBLE_DEVICES": ""}, "no_cards", "NPU_VISIBLE_DEVICES=''"),
    ("", {}, NPU, "no_cards", "PADDLE_XCCL_BACKEND=npu"),
    ("--gpus 0,1", EIGHT, {"CUDA_VISIBLE_DEVICES": "4,5"}, "card_hidden", "here cards 4, 5"),
    ("--devices 2", {}, {**NPU, "NPU_VISIBLE_DEVICES": "0,1"}, "card_hidden", "DEVICES=0,1"),
    ("--selected_gpus 0-8", EIGHT, {}, "card_missing", "card 8: "),
    ("--selected_gpus 3-1", EIGHT, {}, "cards_invalid", "3-1 "),
    ("--selected_gpus a", EIGHT, {}, "cards_invalid", "'a'"),
    ("--selected_gpus -1", EIGHT, {}, "cards_invalid", "'-1'"),
    ("--selected_gpus 0,0", EIGHT, {}, "cards_repeated", "card 0 "),
    ("--selected_gpus 0-2,1", EIGHT, {}, "cards_repeated", "card 1 "),
    ("--gpus 0,1 --nproc_per_node 3", EIGHT, {}, "options_conflict", "2 cards"),
    ("--devices 0,1 --nproc_per_node 3", {}, NPU, "options_conflict", "2 cards"),
    (f"--master {B}:33000 --ips {A},{B}", {}, {}, "options_conflict", "--ips"),
    (f"--master {B}:33000 --max_restart 2", {}, {}, "options_conflict", "--max_restart"),
    ("--nproc_per_node 9", EIGHT, {}, "cards_too_few", "8 visible GPUs"),
    ("--nproc_per_node 3", {}, {**NPU, "NPU_VISIBLE_DEVICES": "0"}, "cards_too_few", "1 visible"),
    ("--gpus 0-7", {"cards": 8, "build": "cpu"}, {}, "paddle_without_cards", "8 visible GPUs"),
    ("", {"build": "none"}, {}, "paddle_missing", ""),
    ("absent.py", {}, {}, "script_not_found", "'absent.py'"),
    ("--gpus 0 1", {"cards": 2}, {}, "script_missing", "--selected_gpus 0,1"),
    (IPS, {}, {"GLOO_SOCKET_IFNAME": "ib0"}, "interface_wrong", f"eth1 ({A}), sit0 (without IPv4)"),
    (IPS, {}, {"GLOO_SOCKET_IFNAME": "sit0"}, "interface_wrong", "IFNAME=sit0"),
    (IPS, {}, {"GLOO_SOCKET_IFNAME": "lo"}, "interface_wrong", "holds 127.0.0.1"),
    ("", {}, {"GLOO_SOCKET_IFNAME": "eth9"}, "interface_wrong", "IFNAME=eth9"),
    ("--ips=10.1.1.1,10.1.1.2", {}, {}, "ips_without_this_host", "10.1.1.1, 10.1.1.2"),
    (f"--ips={A},{A}", {}, {}, "ips_repeated", f"{A} and {A}"),
    (f"--ips={A},node-a", {}, {}, "ips_repeated", f"node-a and {A}"),
    (f"--ips=127.0.0.1,{A}", {}, {}, "ips_loopback", "127.0.0.1"),
    ("--ips=127.0.0.1,127.0.0.2", {}, {}, "ips_loopback", "127.0.0.1"),
    (f"--ips=self,{B}", {}, {}, "ips_loopback", "self (here 127.0.1.1)"),
    (f"--ips=nowhere,{A}", {}, {}, "host_name_unknown", "nowhere"),
    (f"--ips={A}:6070,{B}", {}, {}, "ips_invalid", f"{A}:6070"),
    ("--ips=127.0.0.2,127.0.0.3", {}, {}, "ips_ambiguous", "--host 127.0.0.2"),
    ("--ips=,", {}, {}, "ips_empty", ""),
    (f"{IPS} --host 10.9.0.3", {}, {}, "host_not_in_ips", "10.9.0.3"),
]


@pytest.mark.parametrize(("command", "on", "variables", "code", "named"), REFUSED)
def test_what_cannot_work_is_refused_before_the_start(command, on, variables, code, named) -> None:
    with raises(code, named):
        plan(command, machine(**on), **variables)


METRICS_PORTS = [
    ("--start_port 9440 --metrics_port 9440", A, "port 9440"),
    ("--start_port 9439 --nproc_per_node 2 --metrics_port 9440", A, "ports 9439-9440"),
    (f"{IPS} --metrics_port 6070", A, "ports 6070-6071"),
    (f"{IPS} --metrics_port 0.0.0.0:6071", B, "ports 6070-6071"),
    (f"--master {B}:9440 --nnodes 2 --metrics_port 9440", A, "port 9440"),
]


@pytest.mark.parametrize(("command", "own", "needs"), METRICS_PORTS)
def test_a_metrics_port_that_the_run_needs_is_refused(command: str, own: str, needs: str) -> None:
    with raises("metrics_port_taken", f"the run itself needs {needs};"):
        plan(command, machine(own=own, taken=(9440,)))
    free = command.replace("metrics_port 9440", "metrics_port 9441")
    assert plan(free.replace(":6071", ":6072").replace("t 6070", "t 6069"), machine(own=own))


@pytest.mark.parametrize("own", [A, B])
def test_this_machine_finds_itself_among_the_hosts(own: str) -> None:
    made = plan(f"--ips={A},{B} --selected_gpus 0-7", machine(cards=8, own=own))
    assert (made.host, made.hosts, made.rendezvous_port) == (own, (A, B), 6070)
    first = made.ranks[0]
    assert first["PADDLE_MASTER"] == f"{A}:6071"  # the fleetruns have the one before
    assert first["PADDLE_CURRENT_ENDPOINT"] == f"{own}:6071"
    assert first["PADDLE_TRAINER_ID"] == ("0" if own == A else "8")
    assert first["PADDLE_TRAINERS_NUM"] == "16"
    assert made.environment["GLOO_SOCKET_IFNAME"] == "eth1"
    assert made.environment["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert ("host 1 of 2" if own == A else "host 2 of 2") in made.description


def test_interfaces_that_the_user_chose_are_kept() -> None:
    made = plan(f"--ips={A},{B}", machine(), GLOO_SOCKET_IFNAME="eth1", NCCL_SOCKET_IFNAME="^lo")
    assert made.environment["GLOO_SOCKET_IFNAME"] == "eth1"
    assert made.environment["NCCL_SOCKET_IFNAME"] == "^lo"


def test_a_second_address_leaves_the_interface_open() -> None:
    made = plan("--ips 127.0.0.2,127.0.0.3 --host 127.0.0.3", machine())
    assert made.host == "127.0.0.3"
    assert "GLOO_SOCKET_IFNAME" not in made.environment


def test_one_host_takes_free_ports_for_two_runs() -> None:
    masters = {told(plan("", machine()), "PADDLE_MASTER") for _ in range(5)}
    hosts, ports = zip(*(master.split(":") for master in masters))
    assert len(ports) > 1 and all(20000 <= int(port) < 32000 for port in ports)
    assert set(hosts) == {"127.0.0.1"}


@pytest.mark.parametrize("taken", [7001, 7002])
@pytest.mark.parametrize(("own", "refused"), [(A, True), (B, False)])
def test_taken_port_refused_on_listening_host(own: str, refused: bool, taken: int) -> None:
    command = f"--ips={A},{B} --start_port 7000 --nproc_per_node 2"
    on = machine(own=own, taken=(taken,))
    if not refused:
        assert plan(command, on).rendezvous_port == 7000
        return
    with raises("port_in_use", str(taken)):
        plan(command, on)


def test_free_ports_are_not_where_the_metrics_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.random, "sample", lambda *args: [20000, 20001, 20002])
    made = plan("--nproc_per_node 2 --metrics_port 20001", machine())
    assert told(made, "PADDLE_CURRENT_ENDPOINT") == "127.0.0.1:20002 127.0.0.1:20003"


def test_port_variables_reach_paddle_once() -> None:
    made = plan(f"--ips={A},{B}", machine(), FLAGS_START_PORT="7000", PADDLE_START_PORT="7100")
    assert made.rendezvous_port == 7000 and made.ranks[0]["PADDLE_MASTER"] == f"{A}:7001"
    assert not {"FLAGS_START_PORT", "PADDLE_START_PORT"} & set(made.environment)


def test_paddles_launcher_starts_ranks_with_master_only() -> None:
    assert plan("--job_id x --nnodes 1", machine()).ranks
    master = f"--master {B}:33000"
    made = plan(f"{master} --nnodes 2 --start_port 7000 --nproc_per_node 2", machine())
    assert made.ranks == () and given(made, "--host") == A
    assert (given(made, "--start_port"), given(made, "--nproc_per_node")) == ("7000", "2")
    cards = plan(f"{master} --gpus 0-1", machine(cards=4))
    assert given(cards, "--devices") == "0,1" and given(cards, "--nproc_per_node") is None


def test_ranks_get_the_variables_of_paddles_launcher() -> None:
    """Those are constants here: what Paddle's gives is asked in test_cli.py."""
    made = plan(f"--ips={A},{B} --start_port 7000 --nproc_per_node 2", machine(own=B))
    endpoints = f"{A}:7001,{A}:7002,{B}:7001,{B}:7002"
    assert made.ranks[1] == {
        "PADDLE_MASTER": f"{A}:7001",
        "PADDLE_TRAINER_ENDPOINTS": endpoints,
        "PADDLE_CURRENT_ENDPOINT": f"{B}:7002",
        "PADDLE_TRAINER_ID": "3",
        "PADDLE_GLOBAL_RANK": "3",
        "PADDLE_TRAINERS_NUM": "4",
        "PADDLE_GLOBAL_SIZE": "4",
        "PADDLE_LOCAL_RANK": "1",
        "PADDLE_RANK_IN_NODE": "1",
        "PADDLE_LOCAL_SIZE": "2",
        "PADDLE_NNODES": "2",
        "PADDLE_AUTO_CLUSTER": "0",
        "PADDLE_DISTRI_BACKEND": "gloo",
    }


def test_a_proxy_is_put_aside_as_paddles_launcher_does() -> None:
    variables = plan("", machine(), https_proxy="http://proxy:1", POD_NAME="a-0").environment
    assert variables["https_proxy_original"] == "http://proxy:1" and "https_proxy" not in variables
    assert variables["POD_NAME"] == "a-0" and plan("", machine()).environment["POD_NAME"]


@pytest.mark.parametrize(
    ("typed", "variables"),
    [
        ("--devices npu:2-3", {}),
        ("--npus 2,3", {}),
        ("--devices 2,3", {"PADDLE_XCCL_BACKEND": "npu"}),
        ("--npus 2,3", {"NPU_VISIBLE_DEVICES": "all", "PADDLE_XCCL_BACKEND": "mlu"}),
    ],
)
def test_cards_of_another_kind_are_taken_as_named(typed: str, variables: dict[str, str]) -> None:
    made = plan(typed, machine(cards=8, build="cpu"), CUDA_VISIBLE_DEVICES="7", **variables)
    assert (made.device, made.processes, made.gpus) == ("npu", 2, ())
    assert told(made, "FLAGS_selected_npus") == "2 3"
    assert told(made, "PADDLE_DISTRI_BACKEND") == "xccl xccl"
    assert told(made, "PADDLE_XCCL_BACKEND") == "npu npu"
    assert made.description.endswith("npu 2,3")
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "7"


def test_visible_cards_of_another_kind_are_numbered_anew() -> None:
    made = plan("--devices mlu:6", machine(), MLU_VISIBLE_DEVICES="4, 6")
    assert told(made, "FLAGS_selected_mlus") == "1"
    assert made.environment["MLU_VISIBLE_DEVICES"] == "4,6"
    made = plan("", machine(), MLU_VISIBLE_DEVICES="4,6", PADDLE_XCCL_BACKEND="mlu")
    assert told(made, "FLAGS_selected_mlus") == "0 1"
    made = plan("--nproc_per_node 2", machine(), PADDLE_XCCL_BACKEND="mlu")
    assert told(made, "FLAGS_selected_mlus") == "0 1"
    made = plan("", machine(), MLU_VISIBLE_DEVICES="", PADDLE_XCCL_BACKEND="mlu")
    assert (made.device, told(made, "PADDLE_DISTRI_BACKEND")) == ("cpu", "gloo")


@pytest.mark.parametrize("name", ["XPULINK_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES"])
def test_paddle_is_built_for_xpu_and_needs_no_plug_in(name: str) -> None:
    made = plan("--xpus 3", machine(build="other"), **{name: "2,3"})
    assert told(made, "FLAGS_selected_xpus") == "1"
    assert not {"PADDLE_XCCL_BACKEND", "PADDLE_DISTRI_BACKEND"} & set(made.ranks[0])


def test_ranges_ignore_spaces_and_quotes() -> None:
    assert expand_ids(" '0 - 2, 5' ".strip()) == expand_ids("0-2,5") == ["0", "1", "2", "5"]
    assert expand_ids("0 1") == ["0", "1"]


def test_runs_side_by_side_have_cards_of_their_own() -> None:
    assert split_cards("0,1|2-3") == [["0", "1"], ["2", "3"]]
    assert deal_out(["4", "6", "7"], 3, 1) == [["4"], ["6"], ["7"]]
    assert deal_out(["0", "1", "2", "3", "4"], 2, 2) == [["0", "1"], ["2", "3"]]
    with raises("cards_uneven", "'0-1|2'"):
        split_cards("0-1|2")
    with raises("cards_repeated", "card 1 "):
        split_cards("0-1|1,2")
    with raises("cards_too_few"):
        deal_out(["0", "1", "2"], 2, 2)


def test_nvidia_smi_is_read_without_mig_slices() -> None:
    listing = (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5c8)\n"
        "  MIG 1g.5gb     Device  0: (UUID: MIG-1)\n"
        "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-77e)\n"
    )
    name = "NVIDIA A100-SXM4-40GB"
    assert parse_nvidia_smi(listing) == [Card(0, name, "GPU-5c8"), Card(1, name, "GPU-77e")]
    assert parse_nvidia_smi("No devices were found\n") == []


def test_outer_job_variables_are_not_passed_on() -> None:
    told = {
        name: "1"
        for name in ("PPDIST_RESTART", "PPDIST_SKIP_STEP", "PPDIST_JOB_DIR", "PPDIST_EXIT_DIR")
    }
    environment = make_plan(parse_options(["t.py"], told), told | {"A": "1"}, machine()).environment
    assert environment["A"] == "1" and not set(told) & set(environment)
