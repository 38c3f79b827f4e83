"""tools/train.py, struck by the faults of PPDIST_FAULT (see fault.py)."""

import os
import sys
from pathlib import Path

from ppdist.cli import train
from ppdist.common import process, run_log
from ppdist.common.job import launched_rank
from ppdist.common.signals import hold_signals


def main() -> int:
    arguments = train.parse()
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.faults.fault import VARIABLE, parse_faults

    vars(run_log)["_SILENT_SECONDS"] = 0.0  # whoever looks on wants to see each step
    planned = parse_faults(os.environ.get(VARIABLE, ""))
    if any(fault.kind == "clock" and fault.rank == launched_rank() for fault in planned):
        from tests.faults import clock

        clock.preload()
    hold_signals()  # Paddle, which the injector imports, has handlers of its own
    from tests.faults.injector import FaultInjector

    return train.train(arguments, [FaultInjector(planned)])


if __name__ == "__main__":
    process.run(main)
