"""`python -m ppdist COMMAND ...`; fleetrun starts this file for a command."""

import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
if Path(sys.path[0]).resolve() == _FOLDER:  # started as a script: our folders are no modules
    sys.path[0] = str(_FOLDER.parent)

from ppdist import cli  # noqa: E402

if __name__ == "__main__":
    cli.main()
