"""Sources: paths, patterns, addresses, arrays; what is no image is told."""

import http.server
import io
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ppdist.common.errors import DataError
from ppdist.predict import sources
from ppdist.predict.sources import Source, as_image, expand, is_many, read_source, root_of
from tests.errors import raises
from tests.media import picture, write_video


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("p/a.jpg", "p/deep/b.png", "q/a.jpg", "p/notes.txt", "q/[1].jpg",
                 "p/.ipynb_checkpoints/a-checkpoint.jpg", "p/._a.jpg"):  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names_of(*words: str | int) -> list[str]:
    return [source.name for source in expand(words)]


def test_folders_patterns_and_files_have_names_apart(photos: Path) -> None:
    assert names_of("p") == ["a.jpg", "deep/b.png"]
    assert names_of("p/**/*.png", "p/*.jpg") == ["deep/b.png", "a.jpg"]
    assert names_of("p", "q/a.jpg") == ["a.jpg", "deep/b.png", "a_2.jpg"]
    assert names_of("p", "p/a.jpg") == ["a.jpg", "deep/b.png"]  # once
    assert names_of("q/[1].jpg") == ["[1].jpg"]  # a file of that name, no pattern
    (photos / "data [v1] #x").mkdir()
    (photos / "p" / "a.jpg").rename(photos / "data [v1] #x" / "a.jpg")
    assert names_of("data [v1] #x/*.jpg") == ["a.jpg"]


def test_addresses_and_cameras_have_safe_names(photos: Path) -> None:
    assert names_of(0, "1") == ["camera0", "camera1"]
    assert names_of("https://x.org/a/%2e%2e%2fevil.jpg?b=/c") == ["evil.jpg"]
    assert names_of("http://x.org") == ["x.org.jpg"] and names_of("-") == ["stdin.jpg"]
    assert names_of("rtsp://x.org:8/live") == ["live"]
    assert is_many("rtsp://x/y") and is_many("p") and is_many(0) and is_many("p/*.jpg")
    assert not is_many("p/a.jpg") and not is_many("https://x.org/a.jpg")


def test_a_list_has_a_path_or_an_address_a_line(photos: Path) -> None:
    lines = ["./p/a.jpg", "", "q/a.jpg", "https://x.org/a.jpg", str(photos / "q/a.jpg"), "p/deep"]
    Path("some.txt").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8")
    assert is_many("some.txt")
    sources = expand([str(photos / "some.txt")])
    assert [source.name for source in sources] == ["p/a.jpg", "q/a.jpg", "a.jpg", "b.png"]
    assert sources[1].place == photos / "q/a.jpg"
    Path("none.txt").write_text("p/a.jpg\nnone.jpg\nq/a.jpg\nsome.txt\nnowhere/c.jpg\n")
    with raises("source_not_found", "none.txt:2", "none.jpg", "lines 4, 5") as error:
        expand(["none.txt"])
    assert "none.txt" not in error.value.fix, "a list cannot be in a list"


@pytest.mark.parametrize(
    ("word", "code"),
    [("p/*.gif", "no_images"), ("nowhere", "source_not_found"), ("p/notes.txt", "no_images")],
)
def test_a_source_with_nothing_is_told(photos: Path, word: str, code: str) -> None:
    with raises(code):
        expand([word])


def test_a_place_that_may_not_be_read_is_told(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    for name in ("is_file", "is_dir", "exists"):
        monkeypatch.setattr(Path, name, refuse)
    for ask in (lambda: expand(["p"]), lambda: is_many("p"), lambda: root_of("p")):
        with raises("folder_unreadable", "Permission denied"):
            ask()


@pytest.fixture
def server() -> Iterator[str]:
    """An address that has a picture, a long file and nothing else."""
    content = io.BytesIO()
    Image.fromarray(picture(20, 30)).save(content, "PNG")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = {"/a.png": content.getvalue(), "/long": b"x" * 5000}.get(self.path)
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(found or b"")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def test_an_address_is_read_and_bounded(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert np.array_equal(read_source(f"{server}/a.png"), picture(20, 30))
    monkeypatch.setattr(sources, "_MOST_BYTES", 1000)
    codes = []
    for address in (f"{server}/long", f"{server}/gone", "http://127.0.0.1:1/a.jpg"):
        with pytest.raises(DataError) as error:
            read_source(address)
        codes.append(error.value.code)
    assert codes == ["image_unreadable", "image_unreachable", "image_unreachable"]


def test_a_picture_of_pillow_is_turned_upright() -> None:
    exif, content = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6  # lies on its side
    Image.fromarray(picture(16, 24)).save(content, "PNG", exif=exif)
    assert as_image(Image.open(content)).shape == (24, 16, 3)
    assert as_image(Image.new("L", (5, 4))).shape == (4, 5, 3)


@pytest.mark.parametrize("given", [np.zeros((4, 4)), np.zeros((4, 4, 5), np.uint8), None, 1.5])
def test_what_is_no_image_is_told(given: object) -> None:
    with raises("image_array"):
        as_image(given)


def test_what_imread_gives_for_no_file_is_told_with_the_cause() -> None:
    with raises("image_array", "imread"):
        as_image(None)


@pytest.mark.parametrize(
    ("damaged", "cut", "told"),
    [
        ((), False, ""),
        ((7,), False, "1 of 20"),
        ((7, 8, 15), False, "3 of 20"),
        ((), True, "of 20"),
    ],
)
def test_a_video_goes_on_after_damaged_frames(tmp_path, damaged, cut, told) -> None:
    """Frames keep their numbers; the container's index has all of a file that was cut."""
    write_video(tmp_path / "whole.avi", 20)
    content = bytearray((tmp_path / "whole.avi").read_bytes())
    chunks = [match.start() for match in re.finditer(b"00dc", content)]
    starts = [start for start in chunks if content[start + 8 : start + 10] == b"\xff\xd8"]
    assert len(starts) == 20
    for frame in damaged:
        size = int.from_bytes(content[starts[frame] + 4 : starts[frame] + 8], "little")
        content[starts[frame] + 8 : starts[frame] + 8 + size] = bytes(size)
    (tmp_path / "a.avi").write_bytes(content[: starts[12]] if cut else content)
    reports: list[str] = []
    film = Source(tmp_path / "a.avi", "a.avi")
    whole = {
        f.index: f for f in sources.frames_of(Source(tmp_path / "whole.avi", "w"), pytest.fail)
    }
    frames = list(sources.frames_of(film, reports.append))
    numbers = [frame.index for frame in frames]
    if not cut:
        assert numbers == [number for number in range(20) if number not in damaged]
    assert 0 < len(numbers) <= 20 - len(damaged)
    for frame in frames:
        np.testing.assert_array_equal(frame.image_HW3, whole[frame.index].image_HW3)
    assert len(reports) == bool(told) and all(told in report for report in reports)


def test_a_stream_that_cannot_be_reached_is_an_error() -> None:
    frames = sources.readable_frames(Source("rtsp://127.0.0.1:1/x", "x"), pytest.fail)
    with raises("video_unreadable"):
        next(frames)


def test_a_camera_that_is_not_there_is_reported() -> None:
    reports: list[str] = []
    assert list(sources.frames_of(Source("rtsp://127.0.0.1:1/x", "x"), reports.append)) == []
    assert len(reports) == 1 and "no frame of" in reports[0]
