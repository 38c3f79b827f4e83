"""`python -m ppdist COMMAND ...`; fleetrun starts this file for a command."""

import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
if Path(sys.path[0]).resolve() == _FOLDER:  # run as a script: hide our folders from imports
    sys.path[0] = str(_FOLDER.parent)

from ppdist.common.signals import end_interrupted, hear_interrupt, hold_signals  # noqa: E402


def main() -> None:
    """Entry of the console script, too."""
    if sys.argv[1:2] in (["train"], ["launch"]):  # before the imports of these commands
        hold_signals()
    try:
        hear_interrupt()
        from ppdist import cli

        cli.main()
    except KeyboardInterrupt:
        end_interrupted()


if __name__ == "__main__":
    main()
