"""lm-eval tasks: names are resolved and data sets opened before any model is loaded, then run on one model.

Read `lm_eval_backend.py` for the model side.
"""

from __future__ import annotations

import difflib
import functools
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autoround_fp8.calibration.hub_source import is_reachable
from autoround_fp8.errors import ConfigError, DataError
from autoround_fp8.evaluation.lm_eval_registration import require_lm_eval

logger = logging.getLogger(__name__)

# `dataset_path` values that mean a file type of `datasets`, not a data set of the hub.
_FILE_TYPES = (
    "json",
    "csv",
    "parquet",
    "text",
    "arrow",
    "pandas",
    "xml",
    "sql",
    "webdataset",
    "imagefolder",
    "audiofolder",
)
_WILDCARDS = "*?["
_YAML = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class ResolvedTasks:
    """Tasks that exist and whose data are there.

    Attributes:
        names: Names of the single tasks, groups and tags expanded.
        items: lm-eval's Task and Group objects, as `simple_evaluate` takes them.
        manager: The lm-eval TaskManager they come from.
    """

    names: tuple[str, ...]
    items: tuple[Any, ...]
    manager: Any


def resolve_tasks(tasks: Sequence[str], include_path: str | Path | None = None) -> ResolvedTasks:
    """Finds tasks and opens their data sets; no model is needed.

    Args:
        tasks: Names of lm-eval tasks, groups or tags, patterns such as `mmlu_*`, YAML files, or folders of YAML files.
        include_path: Folder with further task files, whose names come before lm-eval's own.

    Raises:
        ConfigError: If lm-eval is missing, or a task is unknown (with near matches) or cannot be run here.
        DataError: If a task's data set cannot be had, naming the task; within seconds if the hub does not answer.
    """
    require_lm_eval()
    wanted = [task.strip() for task in tasks if task.strip()]
    if not wanted:
        raise ConfigError("no task is named; give --tasks NAME[,NAME...]")
    if include_path is not None and not Path(include_path).is_dir():
        raise ConfigError(f"include_path {str(include_path)!r} is not a folder")
    manager, names = _find(wanted, include_path)
    _check_data_sets(names, manager.task_index)
    items: list[Any] = []
    for name in names:
        items.extend(_load(name, manager))
    singles = {task.task_name: task for item in items for task in _single_tasks(item)}
    for name, task in singles.items():
        if getattr(task, "MULTIMODAL", False) or getattr(task, "UNSAFE_CODE", False):
            what = "runs code that the model writes" if getattr(task, "UNSAFE_CODE", False) else "needs images or sound"
            raise ConfigError(f"task {name!r} {what}, which is not supported here; leave it out")
    return ResolvedTasks(names=tuple(singles), items=tuple(items), manager=manager)


@contextmanager
def _kept_random_states() -> Iterator[None]:
    # lm-eval seeds three generators and leaves them so; loading and task files draw from them, too.
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


@_kept_random_states()
def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: ResolvedTasks | Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: float | None = None,
    num_fewshot: int | None = None,
    batch_size: int | str = 1,
    device: str | int | None = "auto",
    dtype: str | None = None,
    kernel: str = "auto",
    trust_remote_code: bool = False,
    bootstrap_iters: int = 100_000,
) -> dict[str, Any]:
    """Runs tasks on one model with lm-eval.

    Args:
        model: Checkpoint folder or hub id, quantised by this package or plain; or a model in memory.
        tokenizer: Its tokenizer; None = the one in the folder.
        tasks: Resolved tasks, or what `resolve_tasks` takes.
        include_path: Folder with further task files, if `tasks` are names.
        limit: Documents per task: a count, or a fraction below 1. None = all.
        num_fewshot: Examples in the prompt; None = as each task says.
        batch_size: Sequences per forward, or "auto" on a GPU.
        device: cpu, cuda, a GPU number or auto; a model in memory stays where it is.
        dtype: dtype of everything that is not FP8; None = the checkpoint's.
        kernel: Kernel of the FP8 layers.
        trust_remote_code: Whether code from the model's folder may run.
        bootstrap_iters: Resamplings for standard errors that have no formula; 0 = none.

    Returns:
        lm-eval's results, with what was evaluated under the key `autoround_fp8`. Python's, numpy's and torch's random
        states are as before.

    Raises:
        ConfigError, DataError: As of `resolve_tasks`, and for a device or option that cannot be used.
        CheckpointError: If the model cannot be loaded.
    """
    if limit is not None and limit <= 0:
        raise ConfigError(f"limit ({limit}) must be more than 0")
    if num_fewshot is not None and num_fewshot < 0:
        raise ConfigError(f"num_fewshot ({num_fewshot}) must not be negative")
    resolved = tasks if isinstance(tasks, ResolvedTasks) else resolve_tasks(tasks, include_path)
    from lm_eval import simple_evaluate

    from autoround_fp8.evaluation.lm_eval_backend import AutoRoundFP8LM

    lm = AutoRoundFP8LM(
        model if isinstance(model, torch.nn.Module) else str(model),
        tokenizer=tokenizer,
        device=device,
        dtype=dtype or "auto",
        kernel=kernel,
        batch_size=batch_size,
        trust_remote_code=trust_remote_code,
    )
    _check_generation_room(resolved, lm.max_length)
    results = simple_evaluate(
        model=lm,
        tasks=list(resolved.items),
        task_manager=resolved.manager,
        num_fewshot=num_fewshot,
        limit=limit,
        batch_size=lm.batch_size,
        device=str(lm.device),
        log_samples=False,
        bootstrap_iters=bootstrap_iters,
    )
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else str(model)
    return {**results, "autoround_fp8": {"model": name, "linears": lm.linears, "bos_rule": lm.bos_rule.reason}}


def format_results(results: Mapping[str, Any]) -> str:
    """A short table of lm-eval results: task, shots, metric, value and standard error."""
    rows = [("task", "shots", "metric", "value", "stderr")]
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, _, variant = key.partition(",")
            if not isinstance(value, (int, float)) or metric.endswith("_stderr") or not variant:
                continue
            stderr = values.get(f"{metric}_stderr,{variant}")
            label = metric if variant == "none" else f"{metric} ({variant})"
            shots = results.get("n-shot", {}).get(task, "")
            error = f"{stderr:.4f}" if isinstance(stderr, float) else ""
            rows.append((task, str(shots), label, f"{value:.4f}", error))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _find(wanted: Sequence[str], include_path: str | Path | None) -> tuple[Any, list[str]]:
    """A TaskManager that knows all tasks, and names or file paths that it can load.

    Raises:
        ConfigError: Naming the first task that is unknown.
    """
    from lm_eval.tasks import TaskManager

    folders = [str(include_path)] if include_path is not None else []
    folders += [word for word in wanted if Path(word).is_dir()]
    # lm-eval's own 14000 tasks take ten seconds to index, so that is done only if something names one of them.
    manager = TaskManager(include_path=folders, include_defaults=False)
    if not all(_is_local(word, manager.task_index) for word in wanted):
        manager = TaskManager(include_path=folders) if folders else _builtin_manager()
    names: list[str] = []
    for word in wanted:
        names.extend(name for name in _names_of(word, manager) if name not in names)
    return manager, names


@functools.cache
def _builtin_manager() -> Any:
    """lm-eval's own tasks, indexed once per process: nothing of it changes while the process lives."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _names_of(word: str, manager: Any) -> list[str]:
    """What a user's word stands for: names in the index, or one file."""
    if word in manager.task_index:
        return [word]
    if Path(word).is_dir():
        inside = _names_in(Path(word), manager.task_index)
        if not inside:
            raise ConfigError(f"folder {word!r} has no readable lm-eval task file (*.yaml with a 'task' entry)")
        return inside
    if Path(word).suffix in _YAML:
        _read_task_file(Path(word))
        return [str(Path(word).resolve())]
    if any(character in word for character in _WILDCARDS):
        matches = manager.match_tasks([word])
        if matches:
            return list(matches)
    near = difflib.get_close_matches(word, manager.all_tasks, n=3) or [n for n in manager.all_tasks if word in n][:3]
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    raise ConfigError(f"task {word!r} is unknown to lm-eval{hint} (own task files: --include_path FOLDER)")


def _names_in(folder: Path, index: Mapping[str, Any]) -> list[str]:
    """The single tasks whose files lie in a folder, at any depth."""
    return [
        name
        for name, entry in index.items()
        if entry.yaml_path is not None
        and folder.resolve() in entry.yaml_path.resolve().parents
        and not isinstance(_settings(name, index).get("task"), list)
    ]


def _is_local(word: str, index: Mapping[str, Any]) -> bool:
    """Whether the index of the user's own files has everything that a word needs."""
    if word not in index and Path(word).is_dir():
        return True
    if word not in index and Path(word).suffix not in _YAML:
        return False
    return all(name in index or settings for name, settings in _leaves(word, index))


def _settings(name: str, index: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a task, group or tag by name or file, as far as the index has them."""
    entry = index.get(name)
    if entry is None:
        return _read_task_file(Path(name)) if Path(name).suffix in _YAML else {}
    return entry.cfg or {"task": sorted(entry.tags)}


def _read_task_file(path: Path) -> dict[str, Any]:
    """The settings in a task file and the files it includes; functions are left out.

    Raises:
        ConfigError: If there is no such file, or it is not a task.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads `!function name` as nothing: no code is imported here."""

    Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    try:
        with open(path.expanduser(), encoding="utf-8") as file:
            settings = yaml.load(file, Loader=Loader)
    except OSError as e:
        raise ConfigError(f"task file {str(path)!r} cannot be read: {e.strerror or e}") from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"task file {str(path)!r} is not valid YAML: {' '.join(str(e).split())}") from e
    if not isinstance(settings, dict):
        raise ConfigError(f"task file {str(path)!r} is not a YAML mapping with a 'task' entry")
    included = settings.pop("include", None) or []
    for name in [included] if isinstance(included, str) else included:
        settings = {**_read_task_file(path.parent / name), **settings}
    return settings


def _leaves(name: str, index: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The single tasks behind a task, group or tag, with their settings (empty if the index does not know them)."""
    settings = _settings(name, index)
    members = settings.get("task")
    if not isinstance(members, list):
        yield name, settings
        return
    for member in members:
        child = member if isinstance(member, str) else member.get("task", member.get("group"))
        if child in index and child != name:
            yield from _leaves(child, index)
        else:
            # Unknown, or written inside its group.
            yield str(child), {} if isinstance(member, str) else member


def _check_data_sets(names: Sequence[str], index: Mapping[str, Any]) -> None:
    """Refuses, within seconds, a task whose data are on a hub that does not answer.

    Raises:
        DataError: Naming the task and its data set.
    """
    import datasets

    reachable: bool | None = None
    for name in names:
        for task, cfg in _leaves(name, index):
            path = cfg.get("dataset_path")
            if not isinstance(path, str) or path in _FILE_TYPES or "custom_dataset" in cfg or Path(path).exists():
                continue
            if reachable is None:
                offline = datasets.config.HF_HUB_OFFLINE
                reachable = not offline and is_reachable(datasets.config.HF_ENDPOINT)
            if reachable:
                return
            if not _is_cached(path, Path(datasets.config.HF_DATASETS_CACHE)):
                reason = "offline mode is on" if datasets.config.HF_HUB_OFFLINE else "which does not answer"
                raise DataError(
                    f"task {task!r} needs data set {path!r} of {datasets.config.HF_ENDPOINT} ({reason}), and the local "
                    "cache does not have it; use tasks with local data (--include_path FOLDER) or fetch it beforehand"
                )
            logger.warning("task %r: the hub cannot be reached; data set %r is taken from the local cache", task, path)


def _is_cached(name: str, cache: Path) -> bool:
    wanted = name.replace("/", "___").replace("_", "").lower()
    return cache.is_dir() and any(entry.name.replace("_", "").lower() == wanted for entry in cache.iterdir())


def _load(name: str, manager: Any) -> list[Any]:
    """Builds one task, group or tag, data set included.

    Raises:
        DataError: If that fails, whatever the reason.
    """
    import datasets
    import yaml

    # A task file brings its own functions and data set; these are the ways in which both are seen to fail.
    failures = (
        *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, ImportError, AssertionError),
        *(yaml.YAMLError, datasets.exceptions.DatasetsError),
    )
    try:
        loaded = manager.load([name])
    except failures as e:
        message = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise DataError(f"task {name!r} or its data set cannot be loaded: {type(e).__name__}: {message}") from e
    members = {task.task_name for group in loaded.get("groups", {}).values() for task in group.get_all_tasks()}
    nested = {child for children in loaded.get("group_map", {}).values() for child in children}
    tops = [group for key, group in loaded.get("groups", {}).items() if key not in nested]
    return [*tops, *(task for key, task in loaded["tasks"].items() if key not in members)]


def _single_tasks(item: Any) -> list[Any]:
    return list(item.get_all_tasks()) if hasattr(item, "get_all_tasks") else [item]


def _check_generation_room(tasks: ResolvedTasks, max_length: int) -> None:
    """Refuses, before work, a task that generates more than the model has positions (lm-eval asserts it at the end)."""
    for item in tasks.items:
        for task in _single_tasks(item):
            settings = task.get_config("generation_kwargs") or {}
            wanted = next((settings[k] for k in ("max_gen_toks", "max_new_tokens", "max_tokens") if settings.get(k)), 0)
            if task.get_config("output_type") == "generate_until" and int(wanted) >= max_length:
                raise ConfigError(
                    f"task {task.task_name!r} generates {wanted} tokens, which must be less than the model's context "
                    f"({max_length} tokens); leave it out"
                )
