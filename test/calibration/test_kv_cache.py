"""The ranges of keys and values are those that transformers' own cache holds after a plain forward of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCAB_SIZE, save_tiny_model
from tiny_moe_models import save_tiny_moe_model
from transformers import AutoModelForCausalLM, DynamicCache

from autoround_fp8.calibration import kv_cache
from autoround_fp8.calibration.kv_cache import CacheObserver, WatchedCache
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import NumericsError, UnsupportedModelError
from autoround_fp8.export import MemorySink
from autoround_fp8.model_source import open_model
from autoround_fp8.numerics.fp8 import amax_to_scale
from autoround_fp8.pipeline import PreparedRun, compress, export_run, prepare
from autoround_fp8.records import BlockInputs, CacheScales
from autoround_fp8.schemes import parse_scheme

ROWS = torch.randint(4, VOCAB_SIZE, (4, 40), generator=torch.Generator().manual_seed(11))
HEADS, TOKENS = 4, 3  # heads and tokens of the states that are put into a cache by hand


def prepared(folder: Path, **settings: Any) -> PreparedRun:
    base = {"dataset": ROWS, "device": "cpu", "calibration_dtype": "float32", "batch_size": 1, "algorithm": "rtn"}
    config = QuantizeConfig(**{**base, "format": "llm_compressor", "static_kv_dtype": "fp8", **settings})
    return prepare(config, open_model(folder))


def scales_of(folder: Path, **settings: Any) -> list[CacheScales]:
    sink = MemorySink()
    compress(prepared(folder, **settings), sink)
    return sink.cache_scales


def saved(folder: Path, family: str) -> Path:
    return (save_tiny_model if family in FAMILIES else save_tiny_moe_model)(folder, family, dtype=torch.float32)


@torch.no_grad()
def cached_amax(folder: Path, rows: list[torch.Tensor]) -> torch.Tensor:
    """`[blocks, 2]`: the largest key and value in transformers' cache, which here forgets no token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for row in rows:
        cache = DynamicCache()
        model(input_ids=row, cache=cache, use_cache=True)
        assert all(layer.keys.shape[2] == row.shape[1] for layer in cache.layers)
        found.append(torch.tensor([[layer.keys.abs().max(), layer.values.abs().max()] for layer in cache.layers]))
    return torch.stack(found).amax(0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "gpt_neox", "phi3", "mixtral"])
def test_scales_are_those_of_transformers_own_cache(tmp_path: Path, family: str) -> None:
    """Gemma3 has windows of 8 tokens: also what has left the window was in the cache, and counts."""
    folder = saved(tmp_path / "tiny", family)
    run = prepared(folder)
    sink = MemorySink()
    blocks = compress(run, sink).blocks
    counted = cached_amax(folder, [row[None] for row in ROWS])
    probes = cached_amax(folder, list(run.probes))
    seen_amax = torch.maximum(counted, probes)
    wanted = run.config.act_headroom * seen_amax
    assert run.probes
    assert len(sink.cache_scales) == len(blocks) == len(wanted)
    for scales, block, amax, seen in zip(sink.cache_scales, blocks, wanted, seen_amax, strict=True):
        assert torch.equal(torch.cat([scales.k_scale, scales.v_scale]), amax_to_scale(amax))
        assert scales.k_scale.shape == scales.v_scale.shape == (1,)
        assert scales.k_scale.dtype == torch.float32
        assert block.cache is not None
        assert (block.cache.fqn, block.cache.num_tokens) == (scales.fqn, ROWS.numel())
        assert [block.cache.k_amax, block.cache.v_amax] == pytest.approx(seen.tolist(), rel=1e-5)
        assert (block.cache.k_scale, block.cache.v_scale) == (float(scales.k_scale), float(scales.v_scale))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_keys_are_not_those_of_the_projection(tmp_path: Path, family: str) -> None:
    """The norm after the projection sets the size of the keys: with other projections it stays what it was."""
    folder = saved(tmp_path / "tiny", family)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(64.0)
    model.save_pretrained(tmp_path / "large")
    settings = {"range_probes": False}
    for one, other in zip(scales_of(folder, **settings), scales_of(tmp_path / "large", **settings), strict=True):
        assert float(other.k_scale) == pytest.approx(float(one.k_scale), rel=0.02)


@pytest.mark.parametrize("family", ["llama", "olmo2", "gemma2", "mistral", "olmo", "opt", "qwen3_moe", "qwen2_moe"])
def test_watching_changes_nothing_else(tmp_path: Path, family: str) -> None:
    folder = saved(tmp_path / "tiny", family)
    watched, plain = MemorySink(), MemorySink()
    one = compress(prepared(folder), watched)
    other = compress(prepared(folder, static_kv_dtype=None), plain)
    assert len(watched.cache_scales) == len(one.blocks)
    assert plain.cache_scales == []
    assert all(torch.equal(a, b) for a, b in zip(one.hidden_states, other.hidden_states, strict=True))
    assert watched.layers.keys() == plain.layers.keys()
    for fqn, layer in watched.layers.items():
        assert torch.equal(layer.weight.view(torch.uint8), plain.layers[fqn].weight.view(torch.uint8))
        assert layer.input_scale is not None
        assert torch.equal(layer.input_scale, plain.layers[fqn].input_scale)


def test_order_and_repetition_change_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "tiny", "qwen3")
    first = scales_of(folder)
    for rows in (ROWS, ROWS.flip(0)):
        for one, other in zip(first, scales_of(folder, dataset=rows), strict=True):
            assert (one.fqn, one.k_scale, one.v_scale) == (other.fqn, other.k_scale, other.v_scale)


def test_keys_come_from_the_stream_that_the_block_is_fed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "tiny", "llama")
    original, quantized = scales_of(folder), scales_of(folder, enable_quanted_input=True)
    assert torch.equal(original[0].k_scale, quantized[0].k_scale)
    assert len(original) == len(quantized)


def test_dynamic_inputs_are_calibrated_for_the_cache(tmp_path: Path) -> None:
    folder = saved(tmp_path / "tiny", "llama")
    static, dynamic = scales_of(folder), scales_of(folder, scheme=parse_scheme("FP8_DYNAMIC"), algorithm="gptq")
    assert [one.k_scale for one in static] == [one.k_scale for one in dynamic]


def test_blocks_without_a_layer_to_quantise_have_scales_too(tmp_path: Path) -> None:
    folder = saved(tmp_path / "tiny", "llama")
    some = scales_of(folder, ignore_layers=("layers.0",))
    assert [one.v_scale for one in some] == [one.v_scale for one in scales_of(folder)]


def test_tuning_holds_no_graph_of_the_cache(tmp_path: Path) -> None:
    folder = saved(tmp_path / "tiny", "llama")
    tuned = scales_of(folder, iters=3, enable_quanted_input=False)
    assert [one.k_scale for one in tuned] == [one.k_scale for one in scales_of(folder)]
    assert not any(one.k_scale.requires_grad for one in tuned)


def call(**kwargs: Any) -> BlockInputs:
    return BlockInputs(block=3, hidden_states=torch.zeros(1, TOKENS, 8), kwargs=kwargs)


def put(observer: CacheObserver, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> None:
    cache = observer.watch(call(cache=None, use_cache=False), **settings).kwargs["cache"]
    assert cache.get_seq_length(3) == 0
    assert cache.update(key, value, 3, kwargs={}) == (key, value)


def test_only_the_cache_of_the_call_is_replaced() -> None:
    before = call(layer_past=None, use_cache=False, position_ids=7)
    after = CacheObserver("m.attn").watch(before)
    assert isinstance(after.kwargs.pop("layer_past"), WatchedCache)
    assert after.kwargs == {"use_cache": False, "position_ids": 7}
    assert before.kwargs["layer_past"] is None
    assert after.hidden_states is before.hidden_states


def test_probes_widen_the_range_but_are_not_counted() -> None:
    observer = CacheObserver("m.attn")
    ones = torch.ones(2, HEADS, TOKENS, 8)
    put(observer, -3 * ones, ones)
    put(observer, 5 * ones, ones, is_counted=False)
    key, value = observer.ranges("m")
    assert (key.amax, key.num_tokens) == (5.0, 2 * TOKENS)
    assert (value.amax, value.num_tokens) == (1.0, 2 * TOKENS)


def test_keys_and_values_may_have_heads_of_different_sizes() -> None:
    observer = CacheObserver("m.attn")
    put(observer, torch.ones(1, HEADS, TOKENS, 8), torch.full((1, 1, TOKENS, 2), 2.0))
    assert [seen.amax for seen in observer.ranges("m")] == [1.0, 2.0]


def test_nan_is_named() -> None:
    bad = torch.ones(1, HEADS, TOKENS, 8)
    bad[0, 1, 2, 3] = torch.nan
    with pytest.raises(NumericsError, match=r"cached value of 'm.attn' holds NaN"):
        put(CacheObserver("m.attn"), torch.ones(1, HEADS, TOKENS, 8), bad)


def test_a_block_that_caches_nothing_is_named() -> None:
    observer = CacheObserver("m.attn")
    observer.watch(call(cache=None))
    with pytest.raises(UnsupportedModelError, match=r"block 'model.layers.3' put nothing into its KV cache"):
        observer.ranges("model.layers.3")


def test_a_block_without_a_cache_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "CACHE_ARGUMENTS", ("memory",))
    run = prepared(saved(tmp_path / "tiny", "llama"))
    with pytest.raises(UnsupportedModelError, match="decoder block 0 is given no KV cache"):
        export_run(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
