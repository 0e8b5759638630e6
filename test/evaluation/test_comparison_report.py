"""A comparison as strict JSON and as a printed table."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from autoround_fp8.evaluation.block_error import BlockError
from autoround_fp8.evaluation.comparison_report import ComparisonReport, format_comparison

OWN_ERRORS = (0.001, 0.004, 0.0, 0.002, 0.003)


@pytest.fixture
def report() -> ComparisonReport:
    return ComparisonReport(
        reference="original",
        candidate="export",
        dtype="float32",
        kernel="reference",
        num_documents=2,
        num_tokens=100,
        data_sha256="0" * 64,
        kl_mean=0.0123456789,
        kl_stderr=0.001,
        kl_max=0.5,
        document_kl=(0.01, 0.02),
        top1_agreement=0.875,
        reference_perplexity=10.0,
        candidate_perplexity=math.inf,
        reference_bytes=2_000_000,
        candidate_bytes=1_000_000,
        weight_sqnr_db={f"layers.{i}": 30.0 + i for i in range(6)} | {"exact": math.inf},
        unmatched_layers=("head",),
        block_errors=tuple(
            BlockError(name=f"block.{i}", stream_error=0.01, own_error=own) for i, own in enumerate(OWN_ERRORS)
        ),
        seconds=1.5,
        peak_memory_bytes=10**9,
    )


def test_json_is_strict(report):
    fields = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert fields.keys() == {field.name for field in dataclasses.fields(report)}
    assert fields["kl_mean"] == report.kl_mean
    assert fields["candidate_perplexity"] is None
    assert fields["weight_sqnr_db"]["layers.0"] == 30.0
    assert fields["weight_sqnr_db"]["exact"] is None
    assert fields["unmatched_layers"] == ["head"]
    assert fields["document_kl"] == [0.01, 0.02]
    assert [entry["own_error"] for entry in fields["block_errors"]] == list(OWN_ERRORS)
    assert fields["block_errors"][2] == {
        "name": "block.2",
        "stream_error": 0.01,
        "stream_sqnr_db": 20.0,
        "own_error": 0.0,
        "own_sqnr_db": None,
    }


def test_table(report):
    lines = format_comparison(report).splitlines()
    assert "KL per token   0.012346 ± 0.001000 nats (worst 0.5000)" in lines
    assert "FP8 layers     8" in lines
    worst = [line.split()[-1] for line in lines if " dB  layers." in line]
    assert worst == [f"layers.{i}" for i in range(5)]
    assert "±" not in format_comparison(dataclasses.replace(report, kl_stderr=None))


@pytest.mark.parametrize(("per_block", "expected"), [(False, [1, 4, 3]), (True, [0, 1, 2, 3, 4])])
def test_table_of_blocks(report, per_block, expected):
    lines = format_comparison(report, per_block=per_block).splitlines()
    shown = [line.split()[0] for line in lines if line.lstrip().startswith("block.")]
    assert shown == [f"block.{i}" for i in expected]
    assert any("mean over tokens of |h - h_ref|² / |h_ref|²" in line for line in lines)


def test_table_without_what_was_not_measured(report):
    table = format_comparison(dataclasses.replace(report, block_errors=(), weight_sqnr_db={}))
    assert "blocks" not in table
    assert "SQNR" not in table
