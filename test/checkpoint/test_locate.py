"""`locate.py`: what the user typed becomes a folder, or one sentence; an output never endangers its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from autoround_fp8.checkpoint.locate import check_output_location, locate_checkpoint
from autoround_fp8.errors import CheckpointError, ConfigError


def stub_hub(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[str]:
    asked: list[str] = []

    def snapshot_download(repo_id: str, **_: Any) -> str:
        asked.append(repo_id)
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_existing_folder_is_taken_as_it_is_without_asking_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = stub_hub(monkeypatch, tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate_checkpoint(tmp_path) == tmp_path
    assert locate_checkpoint("org/name") == Path("org/name")
    assert asked == []


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert locate_checkpoint("~/m") == tmp_path / "m"


@pytest.mark.parametrize("word", ["nowhere", "/no/such/folder", "./a/b", "../a", "a/b/c", "", "-x/y", "x" * 5000])
def test_missing_path_is_named_and_the_hub_not_asked(word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = stub_hub(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    if word == "":
        assert locate_checkpoint(word) == Path()  # pathlib's reading of the empty word: here
        return
    with pytest.raises(CheckpointError, match="does not exist"):
        locate_checkpoint(word)
    assert asked == []


def test_file_is_refused(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"is a file; give the folder"):
        locate_checkpoint(file)


def test_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = stub_hub(monkeypatch, tmp_path / "cache")
    assert locate_checkpoint("Qwen/Qwen3-0.6B") == tmp_path / "cache"
    assert asked == ["Qwen/Qwen3-0.6B"]


def hub_errors() -> list[Exception]:
    return [
        LocalEntryNotFoundError("no network\nsecond line"),
        OfflineModeIsEnabled("offline mode"),
        ConnectionError("refused"),
        OSError(),
        HfHubHTTPError.__bases__[0]("no route"),  # what the HTTP client itself raises
    ]


@pytest.mark.parametrize("error", hub_errors(), ids=lambda e: type(e).__name__)
def test_hub_failure_is_one_sentence(error: Exception, monkeypatch: pytest.MonkeyPatch):
    stub_hub(monkeypatch, error)
    with pytest.raises(
        CheckpointError, match="'org/name' is neither a local folder nor to be had from the hub"
    ) as raised:
        locate_checkpoint("org/name")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("word", ["org/na--me", "org/na..me", "org/name.git", "org/name."])
def test_ids_the_hub_library_refuses_are_ours_to_report(word: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="neither a local folder"):
        locate_checkpoint(word)


def test_output_must_not_be_or_contain_the_source(tmp_path: Path):
    source = tmp_path / "a" / "model"
    source.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(source)
    for output in (source, tmp_path / "a", tmp_path, source / ".." / "model", link):
        with pytest.raises(ConfigError, match="must not be or contain the source"):
            check_output_location(output, source)


def test_output_beside_or_below_the_source_and_no_source(tmp_path: Path):
    source = tmp_path / "model"
    source.mkdir()
    check_output_location(tmp_path / "model-fp8", source)
    check_output_location(source / "fp8", source)
    check_output_location(tmp_path, None)
