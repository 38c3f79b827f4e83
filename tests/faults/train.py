"""tools/train.py, struck by the faults of PPDIST_FAULT (see fault.py)."""

import os

from ppdist import cli
from ppdist.cli import train
from ppdist.common import process, run_log
from ppdist.common.process import launched_rank
from ppdist.common.signals import hold_signals


def main() -> int:
    arguments = train.parse()
    cli.use_clone("tests/faults")
    from tests.faults.fault import VARIABLE, parse_faults

    run_log._SILENT_SECONDS = 0.0  # whoever looks on wants to see each step
    planned = parse_faults(os.environ.get(VARIABLE, ""))
    if any(fault.kind == "clock" and fault.rank == launched_rank() for fault in planned):
        from tests.faults import clock

        clock.preload()
    hold_signals()  # Paddle, which the injector imports, has handlers of its own
    from tests.faults.injector import FaultInjector

    return train.train(arguments, [FaultInjector(planned)])


if __name__ == "__main__":
    process.run(main)
