"""`make_block_fp8.py`: the folders it makes are native block FP8, and close to their source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from make_block_fp8 import block_scales, main, make_block_fp8
from safetensors.torch import load_file, save_file

from autoround_fp8.checkpoint.reader import INDEX_FILE, SINGLE_FILE, CheckpointReader
from autoround_fp8.checkpoint.source_format import open_source
from autoround_fp8.numerics.fp8 import sqnr_db

LAYER = "model.layers.0"
CONVERTED = (f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight", f"{LAYER}.mlp.experts.1.down_proj.weight")
KEPT = (
    "model.embed_tokens.weight",
    "lm_head.weight",
    f"{LAYER}.mlp.gate.weight",
    f"{LAYER}.mlp.shared_expert_gate.weight",
    f"{LAYER}.block_sparse_moe.gate.weight",
    f"{LAYER}.mlp.router.weight",
    f"{LAYER}.self_attn.o_proj.weight",  # by --skip
)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.fixture
def bf16_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bf16"
    folder.mkdir()
    torch.manual_seed(0)
    tensors = {name: torch.randn(200, 192).bfloat16() for name in (*CONVERTED, *KEPT)}
    tensors[CONVERTED[0]][:128, :128] = 0
    tensors[f"{LAYER}.input_layernorm.weight"] = torch.ones(192).bfloat16()
    save_file(tensors, folder / SINGLE_FILE)
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "hidden_size": 192}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("scale_dtype", ["F32", "BF16", "F8_E8M0", "U8"])
def test_made_folder_opens_and_is_close_to_its_source(bf16_folder: Path, tmp_path: Path, scale_dtype: str):
    target = tmp_path / "fp8"
    make_block_fp8(bf16_folder, target, block=(128, 64), scale_dtype=scale_dtype, skip=["o_proj"])
    raw = json.loads((target / "config.json").read_text())
    block = raw.pop("quantization_config")
    assert raw == {"model_type": "x", "hidden_size": 192}
    assert set(block.pop("modules_to_not_convert")) == {name.removesuffix(".weight") for name in KEPT}
    assert block == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 64],
    }
    assert (target / "tokenizer.json").read_text() == "{}"
    reader = CheckpointReader(target)
    source = open_source(reader, json.loads((target / "config.json").read_text()), torch.bfloat16)
    original = load_file(bf16_folder / SINGLE_FILE)
    assert source.entries.keys() == original.keys()
    assert {name for name, entry in source.entries.items() if entry.is_native_fp8} == set(CONVERTED)
    for name, tensor in original.items():
        if name in CONVERTED:
            assert reader.entries[f"{name}_scale_inv"].dtype == scale_dtype
            # E4M3's 3-bit mantissa gives about 31 dB, whatever the scale, as long as few values are subnormal.
            assert sqnr_db(tensor, source.read(name)) > 29
        else:
            assert bits(source.read(name)) == bits(tensor)


def test_made_scales_are_those_of_the_definition():
    torch.manual_seed(0)
    weight = torch.randn(5, 7)
    weight[:2, :3] = 0
    weight[4, 6] = -448.0
    for i in range(3):
        for j in range(3):
            amax = weight[2 * i : 2 * i + 2, 3 * j : 3 * j + 3].abs().max()
            scale = max((amax / 448).item(), 2.0**-126)
            assert block_scales(weight, (2, 3), "F32")[i, j].item() == scale
            rounded = block_scales(weight, (2, 3), "BF16")
            assert scale <= rounded[i, j].item() <= scale * (1 + 2**-7)
            for name in ("U8", "F8_E8M0"):
                power = 2.0 ** (block_scales(weight, (2, 3), name).view(torch.uint8)[i, j].item() - 127)
                assert power / 2 < scale <= power


def test_a_tied_head_is_listed_and_what_is_no_float_matrix_stays(tmp_path: Path):
    source, target = tmp_path / "bf16", tmp_path / "fp8"
    source.mkdir()
    others = {
        f"{LAYER}.conv.weight": torch.randn(4, 1, 3),
        f"{LAYER}.table.weight": torch.ones(4, 4, dtype=torch.int64),
        f"{LAYER}.mlp.experts.down_proj": torch.randn(2, 4, 4),
        "visual.blocks.0.mlp.up_proj.weight": torch.randn(4, 4),
        "model.layers.2.eh_proj.weight": torch.randn(4, 8),
        "model.projector.weight": torch.randn(4, 4),
    }
    save_file({CONVERTED[0]: torch.randn(4, 4), **others}, source / SINGLE_FILE)
    (source / "config.json").write_text("{}")
    make_block_fp8(source, target)
    made = load_file(target / SINGLE_FILE)
    assert made.keys() == {CONVERTED[0], f"{CONVERTED[0]}_scale_inv", *others}
    assert all(torch.equal(made[name], tensor) for name, tensor in others.items())
    listed = json.loads((target / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert listed.count("lm_head") == 1
    assert "model.projector" in listed


def test_made_shards_are_within_the_limit(bf16_folder: Path, tmp_path: Path):
    whole, split = tmp_path / "whole", tmp_path / "split"
    assert main([str(bf16_folder), str(whole)]) == 0
    assert main([str(bf16_folder), str(split), "--max_shard_size", "160KB", "--block", "128", "128"]) == 0
    one, many = CheckpointReader(whole), CheckpointReader(split)
    files = {entry.file for entry in many.entries.values()}
    assert len(files) > 3
    for file in files:
        assert sum(e.num_bytes for e in many.entries.values() if e.file == file) <= 160_000
    assert set(one.names) == set(many.names)
    assert all(bits(one.read(name)) == bits(many.read(name)) for name in one.names)
    index = json.loads((split / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == many.stored_bytes


def test_make_refuses_what_it_cannot_do(bf16_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "fp8"
    with pytest.raises(ValueError, match="no weight to turn into FP8"):
        make_block_fp8(bf16_folder, target, skip=["."])
    with pytest.raises(ValueError, match="must be two positive numbers"):
        make_block_fp8(bf16_folder, target, block=(0, 128))
    make_block_fp8(bf16_folder, target)
    assert main([str(bf16_folder), str(target)]) == 1
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is quantised already"):
        make_block_fp8(target, tmp_path / "again")
    tensors = load_file(bf16_folder / SINGLE_FILE)
    tensors[CONVERTED[0]][1, 1] = float("inf")
    save_file(tensors, bf16_folder / SINGLE_FILE)
    with pytest.raises(ValueError, match=rf"'{CONVERTED[0]}' holds NaN or infinity"):
        make_block_fp8(bf16_folder, tmp_path / "third")
