"""The same as `fleetrun`, where that name is Paddle's script or not installed:

python tools/launch.py --nproc_per_node 2 tools/train.py -c configs/...
"""

import importlib.util
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    if importlib.util.find_spec("ppdist") is None:  # a checkout that was never installed
        root = str(Path(__file__).resolve().parents[1])
        sys.path.insert(0, root)
        paths = [root, os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    from ppdist.launch.cli import main

    sys.exit(main())
