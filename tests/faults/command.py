"""Injects faults into small two-rank trainings; JSON on stdout: tools/faults.py WHAT

  kills    SIGKILL at --points random (rank, step) points, under fleetrun --max_restart
  soak     random faults of random kinds, in job after job, for --minutes

Every job must end with the weights of an undisturbed one, bit for bit; exit code 1 if one does not.
The kinds of faults are listed in docs/faults.md.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from ppdist.cli import make_parser
from ppdist.common import errors
from ppdist.common.arguments import at_least


def parse() -> argparse.Namespace:
    parser = make_parser("faults", __doc__)
    parser.add_argument("what", choices=["kills", "soak"])
    parser.add_argument("--points", type=at_least(1), default=50, help="kills: how many (50)")
    parser.add_argument("--per-job", type=at_least(1), default=5,
                        help="kills: how many strike one job, one after the other (5)")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=30, help="soak: how long (30)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--folder", type=Path, help="for the jobs, kept (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write the result there, too")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    from ppdist.common.files import make_parent, write_json
    from tests.faults.scenario import STEPS
    from tests.faults.soak import kills, machine, soak

    # As an exception, so that the job of the moment ends with this tool.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if arguments.per_job > STEPS:
        raise errors.ConfigError(
            f"a job has {STEPS} steps only",
            code="option_invalid",
            where=f"--per-job {arguments.per_job}",
        )
    if arguments.json:
        make_parent(arguments.json)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="ppdist-faults-"))
    if arguments.what == "kills":
        result = kills(folder, arguments.points, arguments.per_job, arguments.seed)
    else:
        result = soak(folder, arguments.minutes, arguments.seed)
    command = " ".join(["tools/faults.py", *sys.argv[1:]])
    result |= {"command": command, "machine": machine()}
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json:
        write_json(arguments.json, result, indent=1)
    if not arguments.folder and not result["failures"]:
        shutil.rmtree(folder)
    return 1 if result["failures"] else 0
