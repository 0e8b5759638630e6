"""The tables: whole, without doubles, and every rule about vLLM with its place in vLLM's source."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoround_fp8.formats.table import FORMATS
from autoround_fp8.inspection.consumer_rules import BROKEN, CONSUMERS, NO_READER, RULES, UNKNOWN, VLLM
from autoround_fp8.inspection.contents import NATIVE_FP8, NO_LABEL, OTHER_LABEL

LABELS = {NO_LABEL, NATIVE_FP8, OTHER_LABEL, *(f.name for f in FORMATS if f.name != "fake")}


def test_rules_name_known_consumers_once_each() -> None:
    assert all(set(rule.consumers) <= set(CONSUMERS) and rule.reason for rule in RULES)
    assert len({(rule.fact, rule.labels) for rule in RULES}) == len(RULES)
    assert all(set(rule.labels) <= LABELS for rule in RULES)


def test_every_label_has_its_readers() -> None:
    assert NO_READER.keys() == LABELS
    assert UNKNOWN.keys() <= LABELS
    assert all(set(NO_READER[label]).isdisjoint(UNKNOWN.get(label, ())) for label in LABELS)


def test_rules_about_vllm_name_their_source() -> None:
    wanted = [rule for rule in RULES if VLLM in rule.consumers and rule.fact != BROKEN]
    assert all(rule.source for rule in wanted)
    assert not any(rule.source for rule in RULES if rule not in wanted)


@pytest.mark.skipif("VLLM_SOURCE" not in os.environ, reason="set VLLM_SOURCE to the folder with vLLM 0.33's wheel")
def test_sources_are_in_vllm() -> None:
    base = Path(os.environ["VLLM_SOURCE"]) / "vllm" / "model_executor"
    for rule in RULES:
        if rule.source:
            path, _, line = rule.source.rpartition(":")
            assert (base / path).read_text().splitlines()[int(line) - 1].strip(), rule.source
