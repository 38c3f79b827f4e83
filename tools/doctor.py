"""Checks this host before a run: tools/doctor.py [--ips A,B] [-c cfg.yml [-o k=v ...]]

One line each: OK, WARN (it may work) or FAIL (it will not), with what to do.  Exits 2 on a FAIL.
With several hosts, run it on each.
"""

import argparse
import os
from collections.abc import Iterator

from ppdist import errors
from ppdist.launch.doctor import FAIL, WARN, Finding, attempt, check_host
from ppdist.launch.plan import this_machine


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ips", help="all hosts of the run, as for fleetrun")
    parser.add_argument("--host", help="which of them this is, where that cannot be found out")
    parser.add_argument("--start_port", type=int, help="as for fleetrun")
    parser.add_argument("-c", "--config", help="also check this experiment and its data")
    parser.add_argument("-o", "--override", nargs="+", action="extend", default=[],
                        metavar="KEY=VALUE", help="overrides of config keys")  # fmt: skip
    return parser.parse_args()


def check_experiment(path: str, overrides: list[str]) -> Iterator[Finding]:
    from ppdist.config import load_config
    from ppdist.data.check.consistency import check_same_classes
    from ppdist.data.dataset import read_split

    try:
        config = load_config(path, overrides)
    except errors.UserError as error:
        yield Finding(FAIL, "config", str(error))
        return
    yield Finding("OK", "config", path)
    splits = {}
    for split in ("train", "val"):

        def read(split: str = split) -> str:
            splits[split] = read_split(config.data, split, config.model.num_classes)
            return f"{len(splits[split].records)} images"

        yield attempt(f"data.{split}", read)
    if len(splits) == 2:
        yield attempt(
            "classes",
            lambda: check_same_classes(splits["train"], splits["val"]) or "the same in both splits",
        )


def main() -> int:
    arguments = parse()
    findings = check_host(
        arguments.ips, arguments.host, arguments.start_port, os.environ, this_machine()
    )
    for finding in findings:
        print(finding, flush=True)
    if arguments.config:
        for finding in check_experiment(arguments.config, arguments.override):
            print(finding, flush=True)
            findings.append(finding)
    count = {level: sum(found.level == level for found in findings) for level in (FAIL, WARN)}
    print(f"{count[FAIL]} failed, {count[WARN]} warnings")
    return 2 if count[FAIL] else 0


if __name__ == "__main__":
    errors.run(main)
