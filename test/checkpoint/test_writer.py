"""`writer.py`: exact files, one moment of truth, and nothing of the user's ever touched."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from autoround_fp8.checkpoint import writer as writer_module
from autoround_fp8.checkpoint.layout import ExportLayout, PlannedTensor, plan_layout
from autoround_fp8.checkpoint.reader import DTYPE_NAMES, CheckpointReader, InMemorySource
from autoround_fp8.checkpoint.writer import STAGING_DIR, CheckpointWriter
from autoround_fp8.errors import CheckpointError, ConfigError


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {
        f"layers.{i}.w": torch.randint(0, 127, (4, 8), dtype=torch.uint8).view(torch.float8_e4m3fn) for i in range(3)
    }
    tensors |= {f"layers.{i}.s": torch.rand(4) for i in range(3)}
    return {**tensors, "norm": torch.randn(5).bfloat16(), "empty": torch.zeros(0, 2), "scalar": torch.tensor(3)}


def plan(tensors: dict[str, torch.Tensor], limit: int = 10**9, copied: tuple[str, ...] = ()) -> ExportLayout:
    planned = [
        PlannedTensor(name=n, dtype=DTYPE_NAMES[t.dtype], shape=tuple(t.shape), source=n if n in copied else None)
        for n, t in tensors.items()
    ]
    return plan_layout(planned, copied, (), limit)


def export(folder: Path, limit: int = 10**9, *, overwrite: bool = False, seed: int = 0, **side: bytes) -> None:
    tensors = some_tensors() | {"norm": torch.full((5,), float(seed)).bfloat16()}
    files = {name.replace("_json", ".json"): content for name, content in side.items()}
    writer = CheckpointWriter(folder, plan(tensors, limit), files, overwrite=overwrite)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish({"seed": seed}, {"schema": 1})


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


@pytest.mark.parametrize("limit", [10**9, 50])
def test_safetensors_reads_the_files_bit_for_bit(tmp_path: Path, limit: int):
    tensors = some_tensors()
    out = tmp_path / "a" / "b"
    writer = CheckpointWriter(out, plan(tensors, limit, copied=("norm", "empty")), {})
    for name in reversed(list(tensors)):
        if name not in ("norm", "empty"):
            writer.write(name, tensors[name])
    writer.copy_rest(InMemorySource(tensors))
    writer.finish({"model_type": "x"}, {})
    files = sorted(out.glob("*.safetensors"))
    assert (len(files) > 1) == (limit == 50)
    read = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert read.keys() == tensors.keys()
    assert all(same_bits(read[name], tensors[name]) for name in tensors)
    own = CheckpointReader(out)
    assert all(same_bits(own.read(name), tensors[name]) for name in tensors)


def test_side_files_config_and_report(tmp_path: Path):
    (tmp_path / "tok.json").write_bytes(b"\x00tok")
    tensors = {"a": torch.zeros(2)}
    side: dict[str, Path | bytes] = {"tok.json": tmp_path / "tok.json", "gen.json": b"{}"}
    writer = CheckpointWriter(tmp_path / "out", plan(tensors), side)
    writer.write("a", tensors["a"])
    writer.finish({"x": "ü"}, {"schema": 1})
    found = snapshot(tmp_path / "out")
    assert set(found) == {"config.json", "gen.json", "model.safetensors", "quantization_report.json", "tok.json"}
    assert found["tok.json"] == b"\x00tok"
    assert json.loads(found["config.json"]) == {"x": "ü"}
    assert json.loads(found["quantization_report.json"]) == {"schema": 1, "files": sorted(found)}


def test_non_contiguous_tensor_is_written_in_c_order(tmp_path: Path):
    tensor = torch.arange(12.0).reshape(3, 4).t()
    writer = CheckpointWriter(tmp_path, plan({"a": tensor}), {})
    writer.write("a", tensor)
    writer.finish({}, {})
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], tensor)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, dtype=torch.float16), torch.zeros(3), torch.zeros(2, 1), torch.zeros(())]
)
def test_wrong_dtype_or_shape_is_refused(tmp_path: Path, wrong: torch.Tensor):
    writer = CheckpointWriter(tmp_path, plan({"a": torch.zeros(2)}), {})
    with pytest.raises(CheckpointError, match=r"'a' is torch\.float.* planned F32 \(2,\)"):
        writer.write("a", wrong)
    writer.abort()


def test_tensor_written_twice_is_refused(tmp_path: Path):
    writer = CheckpointWriter(tmp_path, plan({"a": torch.zeros(2)}), {})
    writer.write("a", torch.zeros(2))
    with pytest.raises(CheckpointError, match="'a' was written twice"):
        writer.write("a", torch.ones(2))
    writer.abort()


def test_missing_tensor_is_refused_at_finish_and_nothing_appears(tmp_path: Path):
    writer = CheckpointWriter(tmp_path / "out", plan(some_tensors()), {})
    writer.write("norm", some_tensors()["norm"])
    with pytest.raises(CheckpointError, match=r"8 planned tensors were never written, first 'layers\.0\.w'"):
        writer.finish({}, {})
    assert [p.name for p in (tmp_path / "out").iterdir()] == [STAGING_DIR]
    writer.abort()
    assert not (tmp_path / "out").exists()


def test_source_shorter_than_planned_is_noticed(tmp_path: Path):
    class Short(InMemorySource):
        def chunks(self, name: str) -> Any:
            yield memoryview(b"\0" * 4)

    writer = CheckpointWriter(tmp_path, plan({"a": torch.zeros(2)}, copied=("a",)), {})
    with pytest.raises(CheckpointError, match="'a' has 4 bytes, planned 8"):
        writer.copy_rest(Short({"a": torch.zeros(2)}))
    writer.abort()


def test_abort_removes_only_its_own(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "sub").mkdir()
    before = snapshot(tmp_path)
    writer = CheckpointWriter(tmp_path, plan(some_tensors()), {"tok.json": b""})
    writer.write("norm", some_tensors()["norm"])
    writer.abort()
    writer.abort()
    assert snapshot(tmp_path) == before
    assert {p.name for p in tmp_path.iterdir()} == {"notes.txt", "sub"}


def test_abort_removes_the_folders_it_made_unless_something_is_in_them(tmp_path: Path):
    writer = CheckpointWriter(tmp_path / "x" / "y" / "z", plan({"a": torch.zeros(2)}), {})
    (tmp_path / "x" / "user.txt").write_text("u")
    writer.abort()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["user.txt", "x"]


def test_user_files_are_kept(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.safetensors").write_text("deep")
    export(tmp_path)
    found = snapshot(tmp_path)
    assert found["notes.txt"] == b"mine"
    assert found["sub/model.safetensors"] == b"deep"
    assert not (tmp_path / STAGING_DIR).exists()


def test_leftovers_of_a_killed_run_do_not_get_in(tmp_path: Path):
    (tmp_path / STAGING_DIR).mkdir()
    (tmp_path / STAGING_DIR / "model-00009-of-00009.safetensors").write_text("half")
    export(tmp_path)
    assert set(snapshot(tmp_path)) == {"config.json", "model.safetensors", "quantization_report.json"}


@pytest.mark.parametrize(("first", "second"), [(50, 10**9), (10**9, 50), (50, 90)])
def test_overwrite_leaves_no_stale_shard_or_index(tmp_path: Path, first: int, second: int):
    export(tmp_path, first, seed=1, old_json=b"old")
    (tmp_path / "notes.txt").write_text("mine")
    export(tmp_path, second, overwrite=True, seed=2, new_json=b"new")
    fresh = tmp_path / "fresh"
    export(fresh, second, seed=2, new_json=b"new")
    found = {name: raw for name, raw in snapshot(tmp_path).items() if not name.startswith("fresh/")}
    assert found == {**snapshot(fresh), "notes.txt": b"mine"}
    assert torch.equal(CheckpointReader(tmp_path).read("norm"), torch.full((5,), 2.0).bfloat16())


def test_without_overwrite_an_earlier_export_is_untouched(tmp_path: Path):
    export(tmp_path, seed=1)
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match="already holds an export; use --overwrite"):
        export(tmp_path, seed=2)
    assert snapshot(tmp_path) == before


def test_old_export_stays_until_the_new_one_is_complete(tmp_path: Path):
    export(tmp_path, 50, seed=1)
    before = snapshot(tmp_path)
    writer = CheckpointWriter(tmp_path, plan(some_tensors()), {}, overwrite=True)
    writer.write("norm", some_tensors()["norm"])
    with pytest.raises(CheckpointError, match="never written"):
        writer.finish({}, {})
    writer.abort()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "x.safetensors", "pytorch_model.bin", "tok.json"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_checkpoint_is_refused_and_untouched(tmp_path: Path, name: str, overwrite: bool):
    (tmp_path / name).write_text("theirs")
    with pytest.raises(ConfigError, match=f"already holds '{name}', which this program did not write"):
        export(tmp_path, overwrite=overwrite, tok_json=b"ours")
    assert snapshot(tmp_path) == {name: b"theirs"}
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_foreign_weights_beside_an_own_export_are_refused(tmp_path: Path):
    export(tmp_path)
    (tmp_path / "other.safetensors").write_text("theirs")
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"'other\.safetensors'"):
        export(tmp_path, overwrite=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("files", [["../victim"], ["sub/victim"], ["/etc/hostname"], 5, {"a": 1}, None, [3, None]])
def test_a_forged_report_deletes_nothing(tmp_path: Path, files: Any):
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)
    (out / "sub" / "victim").write_text("v")
    (tmp_path / "victim").write_text("v")
    (out / "quantization_report.json").write_text(json.dumps({"files": files}))
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match=r"'quantization_report\.json', which this program did not write"):
        export(out, overwrite=True)
    assert snapshot(tmp_path) == before


def test_a_forged_report_that_names_a_folder_destroys_nothing(tmp_path: Path):
    export(tmp_path, seed=1)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "victim").write_text("v")
    report = tmp_path / "quantization_report.json"
    report.write_text(json.dumps({"files": [*json.loads(report.read_text())["files"], "sub"]}))
    export(tmp_path, overwrite=True, seed=2)
    assert (tmp_path / "sub" / "victim").read_text() == "v"
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 2}


@pytest.mark.parametrize("below", [False, True])
def test_target_that_is_a_file_is_refused(tmp_path: Path, below: bool):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises((ConfigError, CheckpointError), match="output_dir"):
        export(file / "deeper" if below else file)
    assert snapshot(tmp_path) == {"file": b"mine"}


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def tiny_disk(_: Any) -> Any:
    return shutil._ntuple_diskusage(100, 90, 10)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("owner", "name", "stub", "message"),
    [
        (os, "posix_fallocate", no_space, "No space left"),
        (shutil, "disk_usage", no_space, "No space left"),
        (shutil, "disk_usage", tiny_disk, "GB free, the export needs"),
    ],
)
def test_full_disk_is_found_before_work_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, stub: Callable[..., Any], message: str
):
    monkeypatch.setattr(owner, name, stub)
    with pytest.raises(CheckpointError, match=message):
        export(tmp_path / "a" / "out")
    assert list(tmp_path.iterdir()) == []


def test_failure_while_moving_is_reported_and_never_leaves_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    export(tmp_path, 50, seed=1)
    writer = CheckpointWriter(tmp_path, plan(some_tensors()), {}, overwrite=True)
    for name, tensor in some_tensors().items():
        writer.write(name, tensor)
    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(CheckpointError, match=r"cannot finish the export.*No space left"):
        writer.finish({}, {})
    writer.abort()
    assert not (tmp_path / "config.json").exists()


def test_side_file_that_vanished_keeps_the_old_export(tmp_path: Path):
    out = tmp_path / "out"
    export(out, seed=1)
    before = snapshot(out)
    writer = CheckpointWriter(out, plan({"a": torch.zeros(2)}), {"tok.json": tmp_path / "gone"}, overwrite=True)
    writer.write("a", torch.zeros(2))
    with pytest.raises(CheckpointError, match="cannot finish the export"):
        writer.finish({}, {})
    writer.abort()
    assert snapshot(out) == before


BUSY = r"another run is writing to output_dir '.*'; wait for it or choose another"


def test_second_writer_is_refused_and_the_first_one_is_unharmed(tmp_path: Path):
    out = tmp_path / "out"
    tensors = some_tensors()
    first = CheckpointWriter(out, plan(tensors), {})
    for name, tensor in tensors.items():
        first.write(name, tensor)
        with pytest.raises(ConfigError, match=BUSY):
            CheckpointWriter(out, plan({"a": torch.zeros(2)}), {})
    first.finish({}, {})
    assert torch.equal(load_file(out / "model.safetensors")["norm"], tensors["norm"])
    export(out, overwrite=True, seed=2)


@pytest.mark.parametrize("alias", ["link", "out/../out"])
def test_lock_belongs_to_the_folder_and_not_to_its_name(tmp_path: Path, alias: str):
    first = CheckpointWriter(tmp_path / "out", plan(some_tensors()), {})
    (tmp_path / "link").symlink_to("out")
    with pytest.raises(ConfigError, match=BUSY):
        export(tmp_path / alias)
    first.abort()
    export(tmp_path / "out")


def test_lock_ends_with_abort_and_leaves_no_file(tmp_path: Path):
    for _ in range(2):
        writer = CheckpointWriter(tmp_path, plan(some_tensors()), {})
        assert [p.name for p in tmp_path.iterdir()] == [STAGING_DIR]
        writer.abort()
        assert list(tmp_path.iterdir()) == []


def test_lock_ends_when_the_writer_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        with pytest.raises(CheckpointError, match="No space left"):
            export(tmp_path)
    export(tmp_path)


def test_lock_is_not_kept_by_a_forked_worker(tmp_path: Path):
    writer = CheckpointWriter(tmp_path, plan(some_tensors()), {})
    read_end, write_end = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until the parent closes its end
        os._exit(0)
    try:
        writer.abort()
        export(tmp_path)
    finally:
        os.close(write_end)
        os.close(read_end)
        os.waitpid(worker, 0)


def test_abort_after_finish_does_not_touch_the_next_run(tmp_path: Path):
    first = CheckpointWriter(tmp_path, plan({"a": torch.zeros(2)}), {})
    first.write("a", torch.zeros(2))
    first.finish({}, {})
    second = CheckpointWriter(tmp_path, plan({"a": torch.ones(2)}), {}, overwrite=True)
    first.abort()
    second.write("a", torch.ones(2))
    second.finish({}, {})
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], torch.ones(2))


def test_export_that_another_run_finished_during_the_start_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lock_folder = writer_module._lock_folder

    def slow(folder: Path) -> int | None:
        monkeypatch.setattr(writer_module, "_lock_folder", lock_folder)
        export(folder, seed=1)
        return lock_folder(folder)

    monkeypatch.setattr(writer_module, "_lock_folder", slow)
    with pytest.raises(ConfigError, match="already holds an export"):
        export(tmp_path / "out", seed=2)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"seed": 1}


def test_folder_removed_and_made_again_during_the_start_counts_as_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    flock = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        out.rename(tmp_path / "gone")
        out.mkdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(ConfigError, match=BUSY):
        export(out)
    assert list(out.iterdir()) == []


def no_locks(*_: Any) -> None:
    raise OSError(errno.EBADF, os.strerror(errno.EBADF))


def test_without_locks_of_the_file_system_the_export_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fcntl, "flock", no_locks)
    export(tmp_path / "a")
    monkeypatch.setattr(writer_module, "fcntl", None)
    export(tmp_path / "b")
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


HOLDER = """
import sys
from autoround_fp8.checkpoint.layout import PlannedTensor, plan_layout
from autoround_fp8.checkpoint.writer import CheckpointWriter
planned = [PlannedTensor(name="a", dtype="F32", shape=(2,), source=None)]
writer = CheckpointWriter(sys.argv[1], plan_layout(planned, (), (), 10**9), {})
print("ready", flush=True)
sys.stdin.read()
"""


def test_another_process_is_refused_until_this_one_is_killed(tmp_path: Path):
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            before = snapshot(out)
            with pytest.raises(ConfigError, match=BUSY):
                export(out)
            assert snapshot(out) == before
        finally:
            holder.kill()
    assert snapshot(out) == before
    export(out)
    assert set(snapshot(out)) == {"config.json", "model.safetensors", "quantization_report.json"}


@pytest.mark.parametrize("limit", [10**9, 60])
@pytest.mark.parametrize("links", [True, False])
def test_a_twin_takes_the_weights_of_the_other(
    tmp_path: Path, limit: int, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:

        def refuse(*_args: Any) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", refuse)
    tensors = some_tensors()
    layout = plan(tensors, limit)
    first = CheckpointWriter(tmp_path / "a", layout, {})
    twin = CheckpointWriter(tmp_path / "b", layout, {"x.txt": b"x"}, twin=first)
    assert (first.is_twin, twin.is_twin) == (False, True)
    for name, tensor in tensors.items():
        first.write(name, tensor)
    first.finish({"label": 1}, {})
    twin.finish({"label": 2}, {})
    weights = sorted(p.name for p in (tmp_path / "a").glob("*.safetensors"))
    assert (len(weights) > 1) == (limit == 60)
    for name in weights:
        one, other = tmp_path / "a" / name, tmp_path / "b" / name
        assert one.read_bytes() == other.read_bytes()
        assert one.samefile(other) == links
    assert json.loads((tmp_path / "b" / "config.json").read_text()) == {"label": 2}
    assert json.loads((tmp_path / "a" / "config.json").read_text()) == {"label": 1}
    reader = CheckpointReader(tmp_path / "b")
    assert all(same_bits(reader.read(name), tensor) for name, tensor in tensors.items())
    # Replacing one leaves the other alone.
    export(tmp_path / "a", limit, overwrite=True, seed=5)
    assert same_bits(CheckpointReader(tmp_path / "b").read("norm"), tensors["norm"])


def test_a_twin_that_is_given_up_leaves_the_other(tmp_path: Path) -> None:
    layout = plan(some_tensors())
    first = CheckpointWriter(tmp_path / "out" / "a", layout, {})
    twin = CheckpointWriter(tmp_path / "out" / "b", layout, {}, twin=first)
    twin.abort()
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["a"]
    first.abort()
    assert list(tmp_path.iterdir()) == []
