"""Stands in for fleetrun and tools/train.py: writes metrics.jsonl as they do, at once or slowly.

fake_train.py [--nproc_per_node N] --log_dir DIR SCRIPT -c CFG --eval --resume auto -o k=v ...
Reads of the overrides: output_dir, seed, optimizer.lr (the score), train.epochs; of its environment
FAKE_SECONDS of an epoch, FAKE_CODE with which it ends, and FAKE_WAIT: with a rate below it, it
waits for a signal after its first epoch.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    items = dict(each.split("=", 1) for each in sys.argv[sys.argv.index("-o") + 1 :])
    folder = Path(json.loads(items["output_dir"]))
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "metrics.jsonl"
    epochs, lr = float(items["train.epochs"]), float(items.get("optimizer.lr", "0.001"))
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    with (folder / "starts").open("a", encoding="utf-8") as starts:
        starts.write(f"{os.getpid()}\n")
    done = len(file.read_text().splitlines()) - 1 if file.exists() else 0
    with file.open("a", encoding="utf-8") as lines:
        if not done:
            derived = {"steps_per_epoch": {"value": 10}}
            lines.write(json.dumps({"step": 0, "derived": derived}) + "\n")
        for epoch in range(max(0, done) + 1, int(epochs) + 1):
            until = time.monotonic() + float(os.environ.get("FAKE_SECONDS", "0"))
            while time.monotonic() < until and not stop:
                time.sleep(0.02)
            if stop:
                return 75
            score = lr * epoch / epochs + 0.0001 * float(items.get("seed", "0"))
            record = {"step": epoch * 10, "epoch": float(epoch), "mAP": score, "eval_seconds": 0.1}
            lines.write(json.dumps(record) + "\n")
            lines.flush()
            while epoch == 1 and lr < float(os.environ.get("FAKE_WAIT", "0")) and not stop:
                time.sleep(0.02)
    code = int(os.environ.get("FAKE_CODE", "0"))
    if code:
        print("ppdist: error: the lamp is broken", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
