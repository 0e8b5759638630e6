"""Tasks are found, and their data opened, before any model is loaded."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

from autoround_fp8.errors import ConfigError, DataError
from autoround_fp8.evaluation import tasks as tasks_module
from autoround_fp8.evaluation.tasks import format_results, resolve_tasks, run_tasks


@pytest.fixture
def _unreachable_hub(monkeypatch):
    monkeypatch.setattr(tasks_module, "is_reachable", lambda endpoint: False)


def test_names_files_folders_groups_and_patterns(task_folder):
    assert resolve_tasks(["tiny_choice"], task_folder).names == ("tiny_choice",)
    assert resolve_tasks([str(task_folder / "choice.yaml")]).names == ("tiny_choice",)
    assert set(resolve_tasks([str(task_folder)]).names) == {"tiny_choice", "tiny_perplexity", "tiny_generation"}
    group = resolve_tasks(["tiny_group"], task_folder)
    assert set(group.names) == {"tiny_choice", "tiny_perplexity"}
    assert len(group.items) == 1
    assert resolve_tasks([" tiny_choice ", "", "tiny_choice"], str(task_folder)).names == ("tiny_choice",)


def test_local_tasks_do_not_index_lm_evals_own(task_folder, monkeypatch):
    def fail():
        raise AssertionError("the built-in index was read")

    monkeypatch.setattr(tasks_module, "_builtin_manager", fail)
    resolve_tasks([str(task_folder / "choice.yaml"), str(task_folder)])


@pytest.mark.slow
@pytest.mark.usefixtures("_unreachable_hub")
def test_lm_evals_own_tasks():
    """One test for all that needs the built-in index, which takes ten seconds to read."""
    with pytest.raises(ConfigError, match=r"task 'hellaswga' is unknown to lm-eval; did you mean .*hellaswag"):
        resolve_tasks(["hellaswga"])
    with pytest.raises(ConfigError, match="task 'no_such_task_at_all_xyz' is unknown"):
        resolve_tasks(["no_such_task_at_all_xyz"])
    started = time.perf_counter()
    with pytest.raises(DataError, match=r"task 'piqa' needs data set 'baber/piqa' of http.*does not answer"):
        resolve_tasks(["piqa"])
    with pytest.raises(DataError, match=r"task 'mmlu_.*' needs data set"):
        resolve_tasks(["mmlu"])
    with pytest.raises(DataError, match=r"task 'arc_.*' needs data set"):
        resolve_tasks(["arc_e*"])
    assert time.perf_counter() - started < 5.0


@pytest.mark.usefixtures("_unreachable_hub")
def test_data_sets_in_the_cache_are_tried(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    file = tmp_path / "hub.yaml"
    file.write_text("task: hub_task\ndataset_path: Some-Owner/TinySet\n")
    with pytest.raises(DataError, match="'Some-Owner/TinySet'"):
        tasks_module._check_data_sets([str(file)], {})
    (tmp_path / "Some-Owner___tiny_set").mkdir()  # as `datasets` 5.2 names it
    tasks_module._check_data_sets([str(file)], {})


@pytest.mark.parametrize(
    ("words", "include_path", "message"),
    [
        ([], None, "no task is named"),
        ([" "], None, "no task is named"),
        (["tiny_choice"], "/no/such/folder", "include_path '/no/such/folder' is not a folder"),
        (["/no/such/file.yaml"], None, "task file '/no/such/file.yaml' cannot be read"),
    ],
)
def test_bad_words(words, include_path, message):
    with pytest.raises(ConfigError, match=message):
        resolve_tasks(words, include_path)


@pytest.mark.parametrize("text", ["a: [", "- just\n- a list\n", ""])
def test_files_that_are_no_task(tmp_path, text):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml' is not"):
        resolve_tasks([str(file)])


def test_included_files_and_functions_are_followed(task_folder, tmp_path):
    (tmp_path / "rules.py").write_text("def shown(doc):\n    return doc['question'] + '?'\n")
    (tmp_path / "child.yaml").write_text(
        f"include: {task_folder / 'choice.yaml'}\ntask: child\ndoc_to_text: !function rules.shown\n"
    )
    resolved = resolve_tasks([str(tmp_path / "child.yaml")])
    assert resolved.names == ("child",)
    (task,) = resolved.items
    assert task.doc_to_text({"question": "q"}) == "q?"


def test_missing_data_file_names_the_task(tmp_path):
    (tmp_path / "t.yaml").write_text(
        "task: without_data\ndataset_path: json\ndataset_kwargs: {data_files: {test: /no/such.jsonl}}\n"
        "test_split: test\noutput_type: multiple_choice\n"
    )
    with pytest.raises(DataError, match="task 'without_data' or its data set cannot be loaded"):
        resolve_tasks(["without_data"], tmp_path)


def test_tasks_that_run_model_code_are_refused(task_folder, tmp_path):
    (tmp_path / "t.yaml").write_text(f"include: {task_folder / 'choice.yaml'}\ntask: dangerous\nunsafe_code: true\n")
    with pytest.raises(ConfigError, match="'dangerous' runs code that the model writes"):
        resolve_tasks(["dangerous"], tmp_path)


def test_results_and_table(fp8_checkpoint, task_folder):
    resolved = resolve_tasks(["tiny_group"], task_folder)
    random_states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    options = {"device": "cpu", "limit": 4, "batch_size": 2}
    results = run_tasks(str(fp8_checkpoint), None, resolved, **options)
    again = run_tasks(str(fp8_checkpoint), None, ["tiny_group"], include_path=task_folder, **options)
    assert results["results"] == again["results"]
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == random_states
    assert results["autoround_fp8"]["linears"].startswith("14 x WeightFP8ActFP8StaticQuantLinear (FP8)")
    table = format_results(results)
    assert table.splitlines()[0].split() == ["task", "shots", "metric", "value", "stderr"]
    assert any(line.split()[:3] == ["tiny_choice", "0", "acc"] for line in table.splitlines())
    assert any(line.split()[:3] == ["tiny_perplexity", "0", "byte_perplexity"] for line in table.splitlines())


@pytest.mark.parametrize("option", [{"limit": 0}, {"limit": -1.0}, {"num_fewshot": -1}])
def test_bad_counts(option, task_folder):
    with pytest.raises(ConfigError, match=next(iter(option))):
        run_tasks("/not/looked/at", None, ["tiny_choice"], include_path=task_folder, **option)
