"""Streaming writer: puts each tensor in its planned place, and makes the finished checkpoint appear at once.

Work happens in a hidden folder inside the target; `config.json` is moved last, so a folder with a config is complete.
The target folder itself is locked meanwhile, which leaves no file behind and ends with the process at the latest.
What an earlier run of this package wrote can be replaced; nothing else in the target is ever touched.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from autoround_fp8.checkpoint.layout import ExportLayout
from autoround_fp8.checkpoint.reader import DTYPES, INDEX_FILE, TensorSource, read_json, tensor_bytes
from autoround_fp8.errors import CheckpointError, ConfigError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

STAGING_DIR = ".incomplete-export"
CONFIG_FILE = "config.json"
# Lists the files of an export, so that a later run knows what it may replace.
REPORT_FILE = "quantization_report.json"


class CheckpointWriter:
    """Writes one export into `output_dir`, which is this writer's alone until `finish` or `abort`.

    Args:
        output_dir: Target folder; made if missing. User files in it stay.
        layout: Every tensor's place.
        side_files: File name -> source path, contents, or None for contents that `finish` is given; config.json not
            among them.
        overwrite: Whether an earlier export of this package in the target may be replaced.
        twin: A writer with the same layout, finished before this one: its weights are linked or, where the file system
            has no hard links, copied, instead of written again.

    Raises:
        ConfigError: If the target is a file, holds another checkpoint or a file this export would replace, or if
            another run is writing to it.
        CheckpointError: If the target cannot be written or has too little space.
    """

    def __init__(
        self,
        output_dir: str | Path,
        layout: ExportLayout,
        side_files: Mapping[str, Path | bytes | None],
        *,
        overwrite: bool = False,
        twin: CheckpointWriter | None = None,
    ):
        self.output_dir = Path(output_dir)
        self._layout = layout
        self._twin = twin
        self._side_files = dict(side_files)
        self._places = {name: (shard.file, *shard.ranges[name]) for shard in layout.shards for name in shard.ranges}
        self._written: set[str] = set()
        self._owns_target = False
        self._lock: int | None = None
        check_target(self.output_dir, self._file_names(), overwrite=overwrite)
        self._made_dirs = _missing_parents(self.output_dir)
        self._staging = self.output_dir / STAGING_DIR
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self._lock = _lock_folder(self.output_dir)
            self._owns_target = True
            # Once more, as another run may have finished since; only now is any staging folder a killed run's.
            self._replaced = check_target(self.output_dir, self._file_names(), overwrite=overwrite)
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging.mkdir()
            if twin is None:
                self._check_space()
                for shard in layout.shards:
                    self._reserve(shard.file, shard.header, shard.num_bytes)
        except OSError as e:
            self.abort()
            raise CheckpointError(f"cannot write to output_dir {str(output_dir)!r}: {e.strerror or e}") from e
        except BaseException:
            self.abort()
            raise

    @property
    def is_twin(self) -> bool:
        """Whether the weights come from another writer, so that nothing is to be written here."""
        return self._twin is not None

    def planned_dtype(self, name: str) -> torch.dtype:
        """The dtype a tensor has to be written in."""
        return DTYPES[self._layout.tensors[name].dtype]

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor; dtype and shape must be the planned ones.

        Raises:
            CheckpointError: If the tensor is not as planned, was written before, or the disk is full.
        """
        planned = self._layout.tensors[name]
        if tensor.dtype != DTYPES[planned.dtype] or tuple(tensor.shape) != planned.shape:
            raise CheckpointError(
                f"tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, planned {planned.dtype} {planned.shape}"
            )
        self._put(name, iter([tensor_bytes(tensor.cpu())]))

    def copy_rest(self, source: TensorSource) -> None:
        """Copies every planned tensor that has a source, byte for byte."""
        for name, planned in self._layout.tensors.items():
            if planned.source is not None and name not in self._written:
                self._put(name, source.chunks(planned.source))

    def finish(
        self, config: Mapping[str, Any], report: Mapping[str, Any], late_files: Mapping[str, bytes] | None = None
    ) -> None:
        """Moves the finished files into place, config.json last.

        Args:
            config: Contents of config.json.
            report: Contents of quantization_report.json; the list of exported files is added.
            late_files: Contents of the side files that had none.

        Raises:
            CheckpointError: If a planned tensor was not written, or a file cannot be moved.
        """
        missing = [name for name in self._layout.tensors if name not in self._written]
        if missing and self._twin is None:
            raise CheckpointError(f"{len(missing)} planned tensors were never written, first {missing[0]!r}")
        try:
            if self._twin is not None:
                for shard in self._layout.shards:
                    _link(self._twin.output_dir / shard.file, self._staging / shard.file)
            for name, content in {**self._side_files, **(late_files or {})}.items():
                if isinstance(content, Path):
                    shutil.copyfile(content, self._staging / name)
                else:
                    assert content is not None, name
                    (self._staging / name).write_bytes(content)
            if self._layout.is_sharded:
                _write_json(self._staging / INDEX_FILE, self._layout.index())
            _write_json(self._staging / REPORT_FILE, {**report, "files": sorted(self._file_names())})
            _write_json(self._staging / CONFIG_FILE, config)
            for file in self._staging.iterdir():
                _fsync(file)
            # From here the old export is gone; the new one counts only once its config.json is there.
            for name in sorted(self._replaced, key=lambda name: name != CONFIG_FILE):
                (self.output_dir / name).unlink(missing_ok=True)
            for name in sorted(self._file_names(), key=lambda name: name == CONFIG_FILE):
                os.replace(self._staging / name, self.output_dir / name)
            self._staging.rmdir()
            _fsync(self.output_dir)
        except OSError as e:
            raise CheckpointError(f"cannot finish the export in {str(self.output_dir)!r}: {e.strerror or e}") from e
        self._release()

    def abort(self) -> None:
        """Removes what this writer made, and nothing else; does nothing once the export is finished."""
        if not self._owns_target:
            return
        shutil.rmtree(self._staging, ignore_errors=True)
        for folder in self._made_dirs:
            try:
                folder.rmdir()
            except OSError:
                break
        self._release()

    def _release(self) -> None:
        self._owns_target = False
        if self._lock is not None:
            # Closing is not enough: a forked worker that is still alive shares the lock.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def _file_names(self) -> set[str]:
        names = {shard.file for shard in self._layout.shards} | set(self._side_files) | {CONFIG_FILE, REPORT_FILE}
        return names | ({INDEX_FILE} if self._layout.is_sharded else set())

    def _check_space(self) -> None:
        needed = self._layout.num_bytes
        free = shutil.disk_usage(self.output_dir).free
        if free < needed:
            raise CheckpointError(
                f"output_dir {str(self.output_dir)!r} has {free / 1e9:.2f} GB free, "
                f"the export needs {needed / 1e9:.2f} GB"
            )

    def _reserve(self, file: str, header: bytes, num_bytes: int) -> None:
        with open(self._staging / file, "wb") as handle:
            handle.write(header)
            handle.flush()
            if num_bytes > len(header):
                # Claims the blocks now, so that a full disk is found before the work and not after it.
                os.posix_fallocate(handle.fileno(), 0, num_bytes)

    def _put(self, name: str, chunks: Iterator[memoryview]) -> None:
        if name in self._written:
            raise CheckpointError(f"tensor {name!r} was written twice")
        file, start, end = self._places[name]
        try:
            with open(self._staging / file, "r+b", buffering=0) as handle:
                handle.seek(start)
                for chunk in chunks:
                    rest = chunk
                    while len(rest):
                        rest = rest[handle.write(rest) or 0 :]
                if handle.tell() != end:
                    raise CheckpointError(f"tensor {name!r} has {handle.tell() - start} bytes, planned {end - start}")
        except OSError as e:
            raise CheckpointError(f"cannot write tensor {name!r} to {str(self.output_dir)!r}: {e.strerror or e}") from e
        self._written.add(name)


def check_target(output_dir: Path, new_files: set[str], *, overwrite: bool) -> set[str]:
    """Checks that a target folder may be written to, and says which files of an earlier export must go first.

    Args:
        output_dir: The target, existing or not.
        new_files: Names of the files to be written.
        overwrite: Whether an earlier export by this package may be replaced.

    Raises:
        ConfigError: If something of the user's is in the way.
    """
    if output_dir.exists() and not output_dir.is_dir():
        raise ConfigError(f"output_dir {str(output_dir)!r} is a file; choose a folder")
    if not output_dir.is_dir():
        return set()
    try:
        present = {p.name for p in output_dir.iterdir()}
    except OSError as e:
        raise ConfigError(f"output_dir {str(output_dir)!r} cannot be read: {e.strerror or e}") from e
    old: set[str] = set()
    if REPORT_FILE in present:
        report = read_json(output_dir / REPORT_FILE)
        files = report.get("files") if isinstance(report, dict) else None
        # Plain names only: a report must not make this delete anything outside the folder.
        if isinstance(files, list):
            old = {f for f in files if isinstance(f, str) and f in present and not (output_dir / f).is_dir()}
    weights = {name for name in present if name.endswith((".safetensors", ".bin"))} | (
        present & {CONFIG_FILE, INDEX_FILE}
    )
    in_the_way = sorted((weights | (new_files & present)) - old)
    if in_the_way:
        raise ConfigError(
            f"output_dir {str(output_dir)!r} already holds {in_the_way[0]!r}, which this program did not write; "
            "choose another --output_dir"
        )
    if old and not overwrite:
        raise ConfigError(
            f"output_dir {str(output_dir)!r} already holds an export; use --overwrite to replace it, "
            "or another --output_dir"
        )
    return old


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _lock_folder(folder: Path) -> int | None:
    """Locks a folder against other runs, also of this process, until its descriptor is unlocked or the process ends.

    Returns:
        The descriptor, or None where the system or the file system has no such locks.

    Raises:
        ConfigError: If another run has it.
    """
    if fcntl is None:
        return None
    busy = f"another run is writing to output_dir {str(folder)!r}; wait for it or choose another"
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(descriptor)
        raise ConfigError(busy) from e
    except OSError:
        # For example NFS, which locks only files that are open for writing.
        os.close(descriptor)
        return None
    # A run that gave up may have removed the folder after it was opened here, and a third one made it again.
    if not _is_open_at(descriptor, folder):
        os.close(descriptor)
        raise ConfigError(busy)
    return descriptor


def _is_open_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _missing_parents(folder: Path) -> list[Path]:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    return missing


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
