"""log.on_end: what it is given, when it is called, and that it fails no run."""

import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from ppdist.common.errors import DataError
from ppdist.engine import end_hook
from ppdist.engine.end_hook import EndHook


def end_run(target, folder, *, status=0, error=None, has_results=False) -> None:
    with suppress(DataError), EndHook(target, folder, ["ppdist", "train", "my data"]) as hook:
        hook.status, hook.has_results = status, has_results
        if error is not None:
            raise error


def read_summary(folder) -> dict:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture
def command(tmp_path) -> str:
    return f"cat > '{tmp_path / 'summary.json'}'"


def test_finished_run_gives_its_results(tmp_path, command):
    records = [{"step": 2, "loss": 1.5, "lr": 0.1}, {"step": 4, "mAP": 0.25, "eval_seconds": 1.0}]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "checkpoints" / "step-4").mkdir(parents=True)
    (tmp_path / "checkpoints" / "best").symlink_to("step-4")
    end_run(command, tmp_path, has_results=True)
    summary = read_summary(tmp_path)
    assert (summary["outcome"], summary["exit_code"], summary["code"]) == ("finished", 0, None)
    assert (summary["step"], summary["loss"]) == (2, 1.5)
    best = {"checkpoint": str(tmp_path / "checkpoints" / "best"), "step": 4, "mAP": 0.25}
    assert summary["best"] == best and "last" not in summary
    assert summary["command"] == "ppdist train 'my data'"


def test_stopped_run_says_so(tmp_path, command):
    end_run(command, tmp_path, status=75)
    summary = read_summary(tmp_path)
    assert (summary["outcome"], summary["exit_code"]) == ("stopped", 75)


def test_failed_run_gives_the_code_of_its_error(tmp_path, command):
    end_run(command, tmp_path, error=DataError("empty", code="no_images", where="shapes"))
    summary = read_summary(tmp_path)
    assert (summary["outcome"], summary["exit_code"]) == ("failed", 2)
    assert (summary["code"], summary["message"]) == ("no_images", "shapes: empty")
    assert "step" not in summary, "records of an earlier run are not those of this one"


def test_error_of_the_run_goes_on(tmp_path, command):
    with pytest.raises(DataError), EndHook(command, tmp_path, []):
        raise DataError("empty", code="no_images")


@pytest.mark.parametrize(
    ("target", "word"),
    [("echo broken >&2; exit 3", "broken"), ("http://127.0.0.1:9/x", "URLError")],
)
def test_hook_that_fails_is_a_warning(tmp_path, capfd, target, word):
    end_run(target, tmp_path)
    assert word in capfd.readouterr().err


def test_slow_hook_is_ended_with_its_children(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(end_hook, "_SECONDS", 0.3)
    began = time.monotonic()
    end_run(f"sleep 30 & echo $! > {tmp_path / 'id'}; wait", tmp_path)
    assert time.monotonic() - began < 10
    assert "warning" in capfd.readouterr().err
    stat = Path("/proc") / (tmp_path / "id").read_text().strip() / "stat"
    with suppress(FileNotFoundError):  # a busy kernel may not have removed it yet
        while stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
            assert time.monotonic() - began < 20
            time.sleep(0.05)


def test_other_ranks_call_nothing(tmp_path, command, monkeypatch):
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    end_run(command, tmp_path)
    assert not (tmp_path / "summary.json").exists()


def test_url_is_posted_json_and_may_name_a_variable(tmp_path, monkeypatch):
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, self.headers["Content-Type"], json.loads(body)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.server_port}/secret")
        end_run("$HOOK", tmp_path)
        thread.join(10)
    ((path, kind, summary),) = requests
    assert (path, kind, summary["outcome"]) == ("/secret", "application/json", "finished")
