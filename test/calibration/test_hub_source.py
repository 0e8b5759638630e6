"""`hub_source.py`: hub data sets without a hub: quick errors, the cache, and the way rows are read."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import datasets
import pytest

from autoround_fp8.calibration import hub_source
from autoround_fp8.calibration.hub_source import is_reachable, read_hub_rows
from autoround_fp8.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of the kind the hub has, with two splits."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "test.jsonl").write_text('{"text": "three"}\n')
    return folder


@pytest.fixture
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize("offline", [True, False])
def test_a16_unreachable_hub_fails_within_seconds_and_names_the_way_out(offline: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
    start = time.monotonic()
    with pytest.raises(DataError, match=r"'NeelNanda/pile-10k' cannot be loaded: .*--dataset builtin.*local"):
        list(read_hub_rows("NeelNanda/pile-10k"))
    assert time.monotonic() - start < 5


@pytest.mark.usefixtures("_no_network")
def test_cached_data_set_is_read_offline(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache"))
    (tmp_path / "cache" / "tiny").rename(tmp_path / "cache" / "owner___tiny")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert [row["text"] for row in read_hub_rows("owner/tiny")] == ["one", "two"]


@pytest.mark.parametrize(
    ("split", "texts"),
    [(None, ["one", "two"]), ("test", ["three"]), ("train+test", ["one", "two", "three"]), ("train[:1]", ["one"])],
)
def test_splits(folder: Path, split: str | None, texts: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(hub_source, "is_reachable", lambda endpoint: True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    assert [row["text"] for row in read_hub_rows(str(folder), split)] == texts


def test_unknown_split_is_a_data_error(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub_source, "is_reachable", lambda endpoint: True)
    with pytest.raises(DataError, match=r"split 'dev'.*Available splits.*choose split="):
        list(read_hub_rows(str(folder), "dev"))


def test_any_answer_means_reachable():
    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert is_reachable(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()


def test_silent_server_and_bad_address_are_unreachable_in_time():
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as silent:  # takes the connection, never answers
        start = time.monotonic()
        assert not is_reachable(f"http://127.0.0.1:{silent.server_port}", seconds=0.2)
        assert time.monotonic() - start < 2
    assert not is_reachable("not a url")
