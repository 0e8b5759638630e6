"""A tiny model, its FP8 export, and local lm-eval tasks, made once for all evaluation tests."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tiny_models import EVALUATION_TEXTS, save_tiny_model

from autoround_fp8.autoround import AutoRound

MULTIPLE_CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs:
  data_files: {test: DATA/choice.jsonl}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
PERPLEXITY = """
task: tiny_perplexity
dataset_path: json
dataset_kwargs:
  data_files: {test: DATA/text.jsonl}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: byte_perplexity
    aggregation: weighted_perplexity
    higher_is_better: false
"""
GENERATION = """
task: tiny_generation
dataset_path: json
dataset_kwargs:
  data_files: {test: DATA/text.jsonl}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "x"
generation_kwargs: {until: ["z"]EXTRA}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
GROUP = """
group: tiny_group
task: [tiny_choice, tiny_perplexity]
"""


@pytest.fixture(autouse=True)
def _visible_logs(monkeypatch):
    # The command line turns propagation off; caplog needs it.
    monkeypatch.setattr(logging.getLogger("autoround_fp8"), "propagate", True)


@pytest.fixture(autouse=True)
def _own_dataset_cache(monkeypatch, tmp_path_factory):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets_cache"))


@pytest.fixture(scope="session")
def plain_checkpoint(tmp_path_factory) -> Path:
    """A tiny Qwen3 in bfloat16 with its tokenizer."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "plain", "qwen3")


@pytest.fixture(scope="session")
def fp8_checkpoint(plain_checkpoint) -> Path:
    """Its FP8 export."""
    folder = plain_checkpoint.parent / "fp8"
    AutoRound(str(plain_checkpoint), nsamples=4, seqlen=64, algorithm="rtn").quantize_and_save(folder)
    return folder


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory) -> Path:
    """Task files on local data: multiple choice, rolling perplexity, generation, and a group of two."""
    folder = tmp_path_factory.mktemp("tasks")
    data = tmp_path_factory.mktemp("data")
    questions = [{"question": f"q{i}:", "choices": ["yes", "no"], "answer": i % 2} for i in range(6)]
    (data / "choice.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (data / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in EVALUATION_TEXTS))
    for name, text in {
        "choice": MULTIPLE_CHOICE,
        "perplexity": PERPLEXITY,
        "generation": GENERATION.replace("EXTRA", ""),
        "group": GROUP,
    }.items():
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    (data / "long_generation.yaml").write_text(
        GENERATION.replace("tiny_generation", "long_generation")
        .replace("EXTRA", ", max_gen_toks: 4000")
        .replace("DATA", str(data))
    )
    return folder


@pytest.fixture(scope="session")
def long_generation_file(task_folder) -> Path:
    """A task that generates more tokens than the tiny models have positions."""
    data_line = next(line for line in (task_folder / "choice.yaml").read_text().splitlines() if "data_files" in line)
    return Path(data_line.partition("test: ")[2].partition("/choice.jsonl")[0]) / "long_generation.yaml"
