"""tools/benchmark.py in this process: its report, or how it refuses."""

import json

from tests.forked import ROOT, run_here, succeeded

CONFIG = ROOT / "configs" / "examples" / "demo.yml"
SMALL = ["model.image_size=[64,64]", "train.batch_size_per_card=2", "data.workers=0",
         "model.width_multiple=0.125", "evaluate.batch_size_per_card=16"]  # fmt: skip


def report_of(what, *options):
    """What it prints of data that it draws itself."""
    more = ["-c", CONFIG, "--synthetic", "8", "-o", *SMALL, *options]
    return json.loads(succeeded(run_here("benchmark", what, *more)))


def refusal_of(*arguments):
    done = run_here("benchmark", *arguments)
    assert done.returncode == 2
    return done.stderr
