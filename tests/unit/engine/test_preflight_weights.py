"""Published weights come to every host, the same everywhere."""

import pytest

from ppdist.common import retry
from ppdist.common.errors import CodedError
from ppdist.distributed import comm
from ppdist.engine import preflight
from ppdist.engine.preflight import fetch_on_all_ranks
from ppdist.models.zoo import local_weights
from tests.distributed import run_on_ranks
from tests.errors import raises
from tests.file_server import serving
from tests.unit.engine.tiny import init_cpu

CONTENT = bytes(range(256)) * 64
NAME, FILE = "yolov5n_coco", "yolov5n.pt"


def on_ranks(environment):
    """What each rank says of a download that works, and of one that does not."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(retry, "_START_SECONDS", 0.1)
        init_cpu()
        fetch_on_all_ranks(NAME)
        fetch_on_all_ranks("x.pt")
        found = local_weights(NAME).read_bytes() == CONTENT
        try:
            fetch_on_all_ranks("yolov5s_coco")
        except CodedError as error:
            return {"found": found, "code": error.code, "rank": comm.rank(), "text": f"{error}"}
    return {"found": found, "code": None}


def test_one_rank_of_a_host_downloads_and_all_decide(tmp_path):
    with serving() as server:
        server.files[f"/{FILE}"] = CONTENT
        server.delay = 0.3  # the others wait
        environment = {"XDG_CACHE_HOME": f"{tmp_path / 'cache'}", "PPDIST_WEIGHTS": server.url}
        target = "tests.unit.engine.test_preflight_weights:on_ranks"
        first, second = run_on_ranks(2, target, environment, hosts=1)
        assert first["found"] and second["found"]
        assert first["code"] == second["code"] == "server_refused"
        assert "rank 0" in second["text"] and "404" in second["text"]
        assert [path for path, _ in server.asked] == [f"/{FILE}", "/yolov5s.pt"]


def test_hosts_with_other_files_are_told(monkeypatch, tmp_path):
    (tmp_path / "a").write_bytes(b"one")
    monkeypatch.setattr(preflight, "local_weights", lambda *_: tmp_path / "a")
    monkeypatch.setattr(preflight, "is_name", lambda _: True)
    monkeypatch.setattr(comm, "world_size", lambda: 2)
    monkeypatch.setattr(comm, "run_on_all_ranks", lambda work: work())
    monkeypatch.setattr(comm, "all_gather_object", lambda mine: [mine, "another"])
    with raises("weights_differ"):
        fetch_on_all_ranks(NAME)
