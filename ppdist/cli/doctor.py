"""Checks hosts, cluster and data before a run:

ppdist doctor [--ips A,B] [-c cfg.yml [-o k=v ...]]

One line each: OK, WARN (it may work) or FAIL (it will not), with what to do.  Where there is more
than one process it then starts them as fleetrun would, compares their code, configuration and data,
and measures an all-reduce by message size.  With several hosts, type it on each.
Exits 2 on a FAIL.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from ppdist.cli import add_config, make_parser, script_words
from ppdist.common import errors
from ppdist.common.addresses import is_remote
from ppdist.common.child import start_here
from ppdist.common.files import write_text
from ppdist.launch.doctor import (
    FAIL,
    WARN,
    Finding,
    attempt,
    check_host,
    check_writable,
    collect_facts,
    format_table,
    judge_speed,
)
from ppdist.launch.options import STALE_VARIABLES, Options, parse_options
from ppdist.launch.topology import LaunchPlan, make_plan, this_machine

Split = Literal["train", "val"]
_REPORT = "PPDIST_DOCTOR_REPORT"  # for the ranks: the report of each host's first rank
_FLEETRUN_OPTIONS = (
    "ips",
    "host",
    "start_port",
    "start_timeout",
    "selected_gpus",
    "nproc_per_node",
)


def parse() -> argparse.Namespace:
    parser = make_parser("doctor", __doc__)
    parser.add_argument("--ips", help="all hosts of the run, as for fleetrun")
    parser.add_argument("--host", help="this host's address in --ips, where it cannot be detected")
    parser.add_argument("--start_port", metavar="P", help="as for fleetrun")
    parser.add_argument("--start_timeout", metavar="SECONDS", help="as for fleetrun")
    cards = parser.add_mutually_exclusive_group()
    cards.add_argument("--selected_gpus", "--devices", "--gpus", metavar="0-3",
                       help="as for fleetrun; default: all cards")  # fmt: skip
    cards.add_argument("--nproc_per_node", metavar="N", help="as for fleetrun")
    add_config(parser, required=False, config="also check this experiment and its data")
    parser.add_argument("--json", metavar="FILE", help="write what was found and measured there")
    parser.add_argument("--quick", action="store_true", help="look at this host, start nothing")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    # This process is a rank started by `check_together`, not the user's own command.
    if _REPORT in os.environ:
        return check_rank(arguments, Path(os.environ[_REPORT]))
    findings: list[Finding] = []
    report: dict[str, Any] = {}
    try:
        report = run_checks(arguments, findings)
    finally:  # after Ctrl-C, too
        if arguments.json:
            rows = [finding.as_json() for finding in findings]
            text = json.dumps({**report, "findings": rows}, indent=1)
            write_text(Path(arguments.json), f"{text}\n")
    count = {level: sum(finding.level == level for finding in findings) for level in (FAIL, WARN)}
    print(f"{count[FAIL]} failed, {count[WARN]} warnings")
    return 2 if count[FAIL] else 0


def run_checks(arguments: argparse.Namespace, findings: list[Finding]) -> dict[str, Any]:
    """Checks this machine and, if there are several processes, how they work together.

    Prints each finding and appends it to `findings` immediately, so that an interrupted check
    keeps the findings so far.

    Returns: what the processes measured together, for --json; {} if they were not started.
    """
    machine = this_machine()
    options = launch_options(arguments)

    def add(finding: Finding) -> None:
        print(finding, flush=True)
        findings.append(finding)

    plan: LaunchPlan | None = None
    try:
        plan = make_plan(options, os.environ, machine)
    except errors.LaunchError as error:
        add(Finding(FAIL, "run", str(error)))
    for finding in check_host(plan, os.environ, machine):
        add(finding)
    if arguments.config:
        # Only the first host of a run writes into output_dir.
        writes = plan is not None and plan.host == plan.hosts[0]
        for finding in check_experiment(arguments.config, arguments.override, writes):
            add(finding)
    report: dict[str, Any] = {}
    has_failed = any(finding.level == FAIL for finding in findings)
    has_several = plan is not None and len(plan.hosts) * plan.processes > 1
    # Processes that would fail for a known reason are not started.
    if has_several and not (has_failed or arguments.quick):
        cluster_findings, report = check_together(arguments, options)
        for finding in cluster_findings:
            add(finding)
    return report


def launch_options(arguments: argparse.Namespace) -> Options:
    """Parses the options as fleetrun would, in the same environment."""
    options = []
    for name in _FLEETRUN_OPTIONS:
        value = getattr(arguments, name)
        options += [] if value is None else [f"--{name}={value}"]
    # Variables left over from another launch are a finding of their own.
    environment = {name: os.environ[name] for name in os.environ if name not in STALE_VARIABLES}
    return parse_options([*options, *script_words("doctor")], environment)


def _check_output_dir(output_dir: str) -> str:
    """Checks that a run can write to its folder, on a disk or in a store; returns a line about it.

    Raises: LaunchError, UserError: a run cannot write there.
    """
    if not is_remote(output_dir):
        return check_writable(Path(output_dir))
    from ppdist.storage.stores import place_of_run, require_writable

    return require_writable(place_of_run(output_dir))


def check_experiment(path: str, overrides: list[str], writes: bool) -> Iterator[Finding]:
    from ppdist.data.datasets.build import check_same_classes, read_split
    from ppdist.engine.recipe import load_config_with_data

    try:
        config = load_config_with_data(path, overrides)
    except errors.UserError as error:
        yield Finding(FAIL, "config", str(error))
        return
    yield Finding("OK", "config", path)
    if writes:
        yield attempt("output_dir", lambda: _check_output_dir(config.output_dir or "output"))
    splits = {}
    names: tuple[Split, ...] = ("train", "val")
    for split in names:

        def read(split: Split = split) -> str:
            splits[split] = read_split(config.data, split, config.model.num_classes)
            return f"{len(splits[split].records)} images"

        yield attempt(f"data.{split}", read)
    if len(splits) == 2:

        def compare() -> str:
            check_same_classes(*splits.values())
            return "the same in both splits"

        yield attempt("classes", compare)


def check_together(
    arguments: argparse.Namespace, options: Options
) -> tuple[list[Finding], dict[str, Any]]:
    """Starts this host's processes; returns their findings and measurements."""
    launcher = [sys.executable, *script_words("launch"), *options.typed]
    script = [*script_words("doctor"), *(["-c", arguments.config] if arguments.config else [])]
    script += ["-o", *arguments.override] if arguments.override else []
    folder = Path(tempfile.mkdtemp(prefix="ppdist-doctor-"))
    file, logs = folder / "report.json", folder / "log"
    command = [*launcher, "--log_dir", str(logs), *script]
    code = start_here(command, env={**os.environ, _REPORT: str(file)}).wait()
    if code or not file.exists():  # keep the logs: the messages refer to them
        remedy = f"its output is above, more of it in {logs}; start the same command on every host"
        message = f"the processes ended with exit code {code}"
        return [Finding(FAIL, "together", message, remedy)], {}
    report = json.loads(file.read_text(encoding="utf-8"))
    shutil.rmtree(folder)
    print("\n".join(format_table(report)), flush=True)
    hosts = len(set(report["hosts"]))
    message = f"{report['world']} processes on {hosts} host{'s' * (hosts > 1)} agree, and can sum"
    findings = [Finding("OK", "together", message)]
    findings += [Finding(WARN, "room", warning) for warning in report["warnings"]]
    return [*findings, *judge_speed(report)], report


def check_rank(arguments: argparse.Namespace, report_file: Path) -> int:
    """Checks this rank against all others and measures the cluster; one per host reports."""
    from ppdist.config.experiment import load_config
    from ppdist.lab.verify.cluster import check_ranks, compare_hosts, measure_cluster

    config = load_config(arguments.config, arguments.override) if arguments.config else None
    warnings = check_ranks(config)
    hosts = compare_hosts(collect_facts(this_machine(), os.environ))
    report = {**measure_cluster(), **hosts, "warnings": warnings}
    if os.environ.get("PADDLE_LOCAL_RANK", "0") == "0":
        report_file.write_text(json.dumps(report), encoding="utf-8")
    return 0
