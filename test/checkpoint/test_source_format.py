"""`source_format.py`: native FP8 checkpoints are read as their definition says, and every fault names its tensor.

The oracle is the definition, element by element: code times the scale of its block, in float32, cast once. Faults D1,
D2, D4, D10, D11.
"""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from autoround_fp8.checkpoint import source_format
from autoround_fp8.checkpoint.reader import DTYPES, INDEX_FILE, CheckpointReader, InMemorySource, TensorSource
from autoround_fp8.checkpoint.source_format import BlockFp8Source, open_source
from autoround_fp8.errors import CheckpointError, ConfigError, NumericsError

W = "model.layers.0.mlp.up_proj.weight"
SCALE = f"{W}_scale_inv"
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
BLOCK = (128, 128)


def config(block: Any = BLOCK, **fields: Any) -> dict[str, Any]:
    size = list(block) if isinstance(block, tuple) else block
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": size, **fields}}


def opened(tensors: dict[str, torch.Tensor], block: Any = BLOCK, dtype: torch.dtype = torch.bfloat16) -> TensorSource:
    return open_source(InMemorySource(tensors), config(block), dtype)


def codes(*shape: int) -> torch.Tensor:
    """Any E4M3 codes but NaN, of both signs, zeros and subnormals among them."""
    magnitude = torch.randint(0, 127, shape, dtype=torch.uint8)
    return (magnitude + 128 * torch.randint(0, 2, shape, dtype=torch.uint8)).view(torch.float8_e4m3fn)


def grid_of(*shape: int, block: tuple[int, int] = BLOCK) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def scales(*shape: int, dtype: str = "F32") -> torch.Tensor:
    """Positive scales, all different where the dtype allows it."""
    if dtype in ("U8", "F8_E8M0"):
        return torch.randint(110, 126, shape, dtype=torch.uint8).view(DTYPES[dtype])
    return (torch.rand(shape) * 1e-2 + 1e-3).to(DTYPES[dtype])


def expected(weight: torch.Tensor, grid: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The definition, one row of one matrix at a time."""
    if grid.dtype == torch.uint8:
        grid = torch.tensor([2.0 ** (b - 127) for b in grid.flatten().tolist()]).reshape(grid.shape)
    values, grid = weight.float(), grid.float()
    if weight.dim() == 3:
        return torch.stack([expected(w, g, block, dtype) for w, g in zip(weight, grid, strict=True)])
    out = torch.empty(weight.shape)
    for i in range(weight.shape[0]):
        row = grid[i // block[0]].tolist()
        out[i] = values[i] * torch.tensor([row[j // block[1]] for j in range(weight.shape[1])])
    return out.to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


SIZES = [(320, 192), (192, 320), (576, 256), (1, 128), (128, 1), (1, 1), (256, 384), (129, 127), (2, 640)]


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_element_is_its_code_times_its_blocks_scale(shape: tuple[int, int], dtype: torch.dtype):
    weight, grid = codes(*shape), scales(*grid_of(*shape))
    source = opened({W: weight, SCALE: grid}, dtype=dtype)
    assert bits(source.read(W)) == bits(expected(weight, grid, BLOCK, dtype))


@pytest.mark.parametrize("block", [(1, 128), (32, 64), (100, 30), (256, 256), (1000, 1000)])
def test_any_block_size_of_the_config_is_followed(block: tuple[int, int]):
    weight, grid = codes(300, 200), scales(*grid_of(300, 200, block=block))
    assert bits(opened({W: weight, SCALE: grid}, block).read(W)) == bits(expected(weight, grid, block, torch.bfloat16))


@pytest.mark.parametrize("scale_dtype", ["F32", "BF16", "F16", "F8_E8M0", "U8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_scale_dtype(scale_dtype: str, dtype: torch.dtype):
    weight, grid = codes(192, 300), scales(2, 3, dtype=scale_dtype)
    source = opened({W: weight, SCALE: grid}, dtype=dtype)
    assert bits(source.read(W)) == bits(expected(weight, grid, BLOCK, dtype))


@pytest.mark.parametrize("code", [0, 1, 127, 200])
def test_exponent_scales_are_powers_of_two(code: int):
    one = torch.ones(1, 1).to(torch.float8_e4m3fn)
    for dtype in ("U8", "F8_E8M0"):
        grid = torch.tensor([[code]], dtype=torch.uint8).view(DTYPES[dtype])
        assert opened({W: one, SCALE: grid}, dtype=torch.float32).read(W).item() == 2.0 ** (code - 127)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("block", [None, "absent", (64, 64)])
def test_one_scale_for_the_whole_weight(shape: tuple[int, ...], block: Any):
    weight, scale = codes(50, 30), scales(*shape)
    raw = config(block)
    if block == "absent":
        del raw["quantization_config"]["weight_block_size"]
    source = open_source(InMemorySource({W: weight, f"{W}_scale": scale}), raw, torch.bfloat16)
    assert list(source.entries) == [W]
    assert bits(source.read(W)) == bits(expected(weight, scale.reshape(1, 1), (50, 30), torch.bfloat16))


@pytest.mark.parametrize("shape", [(300,), (300, 1)])
def test_one_scale_per_row(shape: tuple[int, ...]):
    weight, scale = codes(300, 70), scales(*shape)
    source = opened({W: weight, f"{W}_scale": scale}, None)
    assert bits(source.read(W)) == bits(expected(weight, scale.reshape(300, 1), (1, 70), torch.bfloat16))


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_fused_experts_whole_and_one_by_one(suffix: str):
    weight, grid = codes(5, 192, 320), scales(5, 2, 3)
    source = opened({EXPERTS: weight, EXPERTS + suffix: grid})
    right = expected(weight, grid, BLOCK, torch.bfloat16)
    assert list(source.entries) == [EXPERTS]
    assert bits(source.read(EXPERTS)) == bits(right)
    for index in range(5):
        one = source.read(EXPERTS, index)
        assert one.shape == (192, 320)
        assert bits(one) == bits(right[index]) == b"".join(bytes(c) for c in source.chunks(EXPERTS, index))


@pytest.mark.parametrize(
    ("shape", "block"),
    [(shape, None) for shape in [(4,), (4, 1), (4, 1, 1), (4, 60), (4, 60, 1), (1,), ()]]
    + [(shape, BLOCK) for shape in [(4,), (4, 1), (4, 1, 1)]],  # one block holds a whole matrix
)
def test_fused_experts_without_a_grid(shape: tuple[int, ...], block: Any):
    weight, scale = codes(4, 60, 40), scales(*shape)
    source = opened({EXPERTS: weight, f"{EXPERTS}_scale": scale}, block)
    per_row = scale.expand(4, 60) if scale.numel() == 1 else scale.reshape(4, -1).expand(4, 60)
    right = expected(weight, per_row.reshape(4, 60, 1), (1, 40), torch.bfloat16)
    assert bits(source.read(EXPERTS)) == bits(right)
    assert bits(source.read(EXPERTS, 3)) == bits(right[3])


def test_one_row_of_a_matrix():
    weight, grid = codes(300, 200), scales(3, 2)
    source, right = opened({W: weight, SCALE: grid}), expected(weight, grid, BLOCK, torch.bfloat16)
    for row in (0, 127, 128, 299):
        assert bits(source.read(W, row)) == bits(right[row])


@pytest.mark.parametrize("index", [-1, 5])
def test_an_expert_that_is_not_there_is_named(index: int):
    source = opened({EXPERTS: codes(5, 8, 8), f"{EXPERTS}_scale_inv": scales(5, 1, 1)})
    for read in (lambda: source.read(EXPERTS, index), lambda: list(source.chunks(EXPERTS, index))):
        with pytest.raises(CheckpointError, match=rf"{EXPERTS}.*no entry {index}"):
            read()


def test_one_expert_reads_only_its_own_bytes(monkeypatch: pytest.MonkeyPatch):
    # A damaged neighbour is not noticed, and no scale or code of it is asked for.
    weight, grid = codes(3, 8, 8), scales(3, 1, 1)
    weight.view(torch.uint8)[0] = 0x7F
    grid[1] = float("nan")
    memory = InMemorySource({EXPERTS: weight, f"{EXPERTS}_scale_inv": grid})
    asked: list[int | None] = []
    read = memory.read
    monkeypatch.setattr(memory, "read", lambda name, index=None: (asked.append(index), read(name, index))[1])
    source = open_source(memory, config(), torch.bfloat16)
    assert asked == []
    assert bits(source.read(EXPERTS, 2)) == bits(expected(weight[2], grid[2], BLOCK, torch.bfloat16))
    assert asked == [2, 2]
    with pytest.raises(NumericsError, match=rf"tensor '{EXPERTS}' holds NaN"):
        source.read(EXPERTS, 0)
    with pytest.raises(NumericsError, match=f"scale '{EXPERTS}_scale_inv'"):
        source.read(EXPERTS, 1)


def test_entries_hide_scales_and_keep_the_rest():
    others = {
        "model.norm.weight": torch.rand(4).bfloat16(),
        "model.layers.0.mlp.gate.e_score_correction_bias": torch.rand(4),
        "lm_head.weight": torch.rand(4, 4).half(),
        "logit_scale": torch.rand(1),
    }
    tensors = {W: codes(8, 8), SCALE: scales(1, 1), **others}
    memory = InMemorySource(tensors)
    source = open_source(memory, config(), torch.bfloat16)
    assert isinstance(source, BlockFp8Source)
    assert source.fp8_weights == (W,)
    entry = source.entries[W]
    assert (entry.dtype, entry.stored_dtype, entry.shape, entry.num_bytes) == ("BF16", "F8_E4M3", (8, 8), 128)
    assert entry.is_native_fp8
    assert list(source.entries) == [W, *others]
    assert source.stored_bytes == memory.stored_bytes == sum(t.nbytes for t in tensors.values())
    for name, tensor in others.items():
        assert source.entries[name] == memory.entries[name]
        assert not source.entries[name].is_native_fp8
        assert bits(source.read(name)) == bits(tensor) == b"".join(bytes(c) for c in source.chunks(name))
    assert bits(source.read("lm_head.weight", 2)) == bits(others["lm_head.weight"][2])


@pytest.mark.parametrize("shape", [(700, 96), (3, 100, 96)])
def test_chunks_are_strips_however_the_bytes_arrive(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]):
    weight, grid = codes(*shape), scales(*grid_of(*shape))
    memory = InMemorySource({W: weight, SCALE: grid})
    order = random.Random(0)

    def in_odd_pieces(name: str, index: int | None = None) -> Any:
        data, position = memoryview(bits(memory.read(name, index))), 0
        while position < len(data):
            size = order.randint(1, 30_000)
            yield data[position : position + size]
            position += size

    right = bits(expected(weight, grid, BLOCK, torch.float32))
    monkeypatch.setattr(memory, "chunks", in_odd_pieces)
    source = open_source(memory, config(), torch.float32)
    pieces = [bytes(chunk) for chunk in source.chunks(W)]
    assert b"".join(pieces) == right
    assert max(len(piece) for piece in pieces) == 128 * 96 * 4
    monkeypatch.setattr(source_format, "_STRIP_BYTES", 5 * 96 * 4 + 3)
    pieces = [bytes(chunk) for chunk in source.chunks(W)]
    assert b"".join(pieces) == right
    assert max(len(piece) for piece in pieces) == 5 * 96 * 4


def test_weight_and_scale_in_different_shards(tmp_path: Path):
    weight, grid = codes(320, 192), scales(3, 2)
    save_file({W: weight}, tmp_path / "1.safetensors")
    save_file({SCALE: grid}, tmp_path / "2.safetensors")
    index = {"weight_map": {W: "1.safetensors", SCALE: "2.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    source = open_source(CheckpointReader(tmp_path), config(), torch.bfloat16)
    assert bits(source.read(W)) == bits(expected(weight, grid, BLOCK, torch.bfloat16))


@pytest.mark.parametrize(
    ("shape", "block", "scale_shape"),
    [
        ((0, 300), BLOCK, (0, 3)),
        ((300, 0), BLOCK, (3, 0)),
        ((0, 8), None, (0,)),
        ((8, 0), None, ()),
        ((0, 8), None, ()),
    ],
)
def test_an_empty_grid_belongs_to_an_empty_weight(shape: tuple[int, int], block: Any, scale_shape: tuple[int, ...]):
    source = opened({W: codes(*shape), SCALE: torch.ones(scale_shape)}, block)
    assert source.read(W).shape == shape
    assert list(source.chunks(W)) == []


def test_an_unquantised_source_is_handed_back():
    memory = InMemorySource({W: torch.ones(4, 4)})
    assert open_source(memory, {}, torch.bfloat16) is memory
    assert open_source(memory, {"text_config": None, "quantization_config": None}, torch.bfloat16) is memory
    assert open_source(memory, config(), torch.bfloat16) is memory


@pytest.mark.parametrize("fields", [{}, {"activation_scheme": "dynamic"}, {"activation_scheme": None}])
def test_the_config_may_be_in_text_config(fields: dict[str, Any]):
    memory = InMemorySource({W: codes(8, 8), SCALE: scales(1, 1)})
    source = open_source(memory, {"text_config": config(**fields)}, torch.bfloat16)
    assert list(source.entries) == [W]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"quant_method": "gptq"}, r"already quantised \(quant_method 'gptq'\); start from its 16-bit original"),
        ({"quant_method": "auto-round"}, r"already quantised \(quant_method 'auto-round'\)"),
        ({"quant_method": "compressed-tensors"}, r"already quantised .*'compressed-tensors'"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, r"quantised .*'fp8', activation_scheme 'static'"),
        ({"quant_method": "fp8", "activation_scheme": 3}, r"already quantised .*activation_scheme 3"),
        ({"bits": 4}, r"already quantised .*'unknown'"),
        ("gptq", r"already quantised .*'unknown'"),
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_other_methods_are_refused_by_name(block: Any, message: str, is_nested: bool):
    raw = {"quantization_config": block}
    memory = InMemorySource({W: codes(8, 8), SCALE: scales(1, 1)})
    with pytest.raises(ConfigError, match=message):
        open_source(memory, {"text_config": raw} if is_nested else raw, torch.bfloat16)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_an_fp8_tensor_without_a_config_is_refused(dtype: str):
    memory = InMemorySource({W: torch.ones(8, 8).to(DTYPES[dtype])})
    with pytest.raises(CheckpointError, match=rf"'{W}' is {dtype}, but config.json has no quantization_config"):
        open_source(memory, {}, torch.bfloat16)


@pytest.mark.parametrize("size", [[128], [128, 0], [128, -128], [128.0, 128], [True, 128], "128", 128, [], [1, 2, 3]])
def test_a_block_size_that_is_none_is_refused(size: Any):
    with pytest.raises(ConfigError, match=r"weight_block_size .* must be two positive ints, got"):
        opened({W: codes(8, 8), SCALE: scales(1, 1)}, size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_an_output_dtype_that_is_none_is_refused(dtype: torch.dtype):
    with pytest.raises(ConfigError, match=str(dtype)):
        opened({W: codes(8, 8), SCALE: scales(1, 1)}, dtype=dtype)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({W: codes(8, 8)}, f"tensor '{W}' is F8_E4M3, but there is no scale '{SCALE}'"),
        ({EXPERTS: codes(2, 8, 8)}, f"'{EXPERTS}' is F8_E4M3, but there is no scale"),
        ({W: codes(8, 8), SCALE: scales(1, 1), f"{W}_scale": scales(1)}, f"'{W}' has two scales"),
        ({SCALE: scales(1, 1)}, f"scale '{SCALE}' has no FP8 weight '{W}'"),
        ({W: torch.ones(8, 8).bfloat16(), SCALE: scales(1, 1)}, f"scale '{SCALE}' has no FP8 weight"),
        ({f"{W}_scale": scales(1)}, f"scale '{W}_scale' has no FP8 weight"),
        ({f"{EXPERTS}_scale_inv": scales(1)}, f"scale '{EXPERTS}_scale_inv' has no FP8 weight"),
        ({EXPERTS: torch.ones(2, 8, 8), f"{EXPERTS}_scale": scales(2)}, f"scale '{EXPERTS}_scale' has no FP8 weight"),
        ({SCALE: scales(1, 1, dtype="F8_E8M0")}, f"'{SCALE}' is F8_E8M0, but no FP8 weight belongs to it"),
        ({W: codes(8, 8).view(torch.float8_e5m2), SCALE: scales(1, 1)}, f"'{W}' is F8_E5M2; only F8_E4M3"),
        ({W: codes(8), SCALE: scales(1)}, rf"'{W}' is F8_E4M3 of shape \[8\]"),
        ({W: codes(1).reshape(()), SCALE: scales(1)}, rf"'{W}' is F8_E4M3 of shape \[\]"),
        ({W: codes(8, 8), SCALE: codes(1, 1)}, f"scale '{SCALE}' is F8_E4M3; scales must be"),
        ({W: codes(8, 8), SCALE: torch.ones(1, 1, dtype=torch.int32)}, f"scale '{SCALE}' is I32; scales must be"),
    ],
)
def test_weights_and_scales_are_one_to_one(tensors: dict[str, torch.Tensor], message: str):
    with pytest.raises(CheckpointError, match=message):
        opened(tensors)


WRONG_GRIDS = {
    (192, 256): [(3, 2), (1, 2), (2, 4), (2,), (), (1, 1), (192, 1), (1, 2, 2), (0, 2)],  # the first: padded by a row
    (0, 256): [(1, 2)],
    (8, 8): [(2, 1)],
    (3, 192, 256): [(2, 2), (2, 2, 2), (3, 2, 1)],
    (3, 8, 8): [(1,)],
}
WRONG_WITHOUT_BLOCKS = {(192, 256): [(2, 2), (256,), (1, 256), (0,)], (3, 192, 256): [(192,), (3, 2, 2)]}


@pytest.mark.parametrize(
    ("shape", "scale_shape", "block"),
    [(s, g, BLOCK) for s, grids in WRONG_GRIDS.items() for g in grids]
    + [(s, g, None) for s, grids in WRONG_WITHOUT_BLOCKS.items() for g in grids],
)
def test_a_scale_of_the_wrong_shape_is_named(shape: tuple[int, ...], scale_shape: tuple[int, ...], block: Any):
    with pytest.raises(CheckpointError) as error:
        opened({W: codes(*shape), SCALE: torch.ones(scale_shape)}, block)
    assert all(text in str(error.value) for text in (repr(SCALE), repr(W), str(list(scale_shape))))
    if block is not None:
        assert str(list(grid_of(*shape))) in str(error.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_scale_that_is_no_scale_is_named_when_read(bad: float):
    grid = scales(3, 2)
    grid[2, 1] = bad
    source = opened({W: codes(300, 200), SCALE: grid})
    with pytest.raises(NumericsError, match=f"scale '{SCALE}' holds values that are not finite and positive"):
        source.read(W)


@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
def test_exponent_255_is_nan(dtype: str):
    grid = scales(3, 2, dtype=dtype)
    grid.view(torch.uint8)[2, 1] = 255
    with pytest.raises(NumericsError, match=f"scale '{SCALE}'"):
        opened({W: codes(300, 200), SCALE: grid}).read(W)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("place", [(0, 0), (299, 199)])
def test_a_nan_code_names_the_weight(code: int, place: tuple[int, int]):
    weight = codes(300, 200)
    weight.view(torch.uint8)[place] = code
    source = opened({W: weight, SCALE: scales(3, 2)})
    with pytest.raises(NumericsError, match=f"tensor '{W}' holds NaN codes"):
        source.read(W)


def test_a_value_beyond_the_dtype_names_weight_and_scale():
    tensors = {W: torch.full((8, 8), 448.0).to(torch.float8_e4m3fn), SCALE: torch.full((1, 1), 200.0)}
    assert opened(tensors).read(W).max().item() == 448 * 200
    with pytest.raises(NumericsError, match=f"tensor '{W}' times its scale '{SCALE}' does not fit F16"):
        opened(tensors, dtype=torch.float16).read(W)


def test_an_unknown_tensor_is_named(tmp_path: Path):
    save_file({W: codes(8, 8), SCALE: scales(1, 1)}, tmp_path / "model.safetensors")
    source = open_source(CheckpointReader(tmp_path), config(), torch.bfloat16)
    with pytest.raises(CheckpointError, match="'nothing' is missing"):
        source.read("nothing")


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize("listed", ["model.layers.0.mlp.up_proj", "model.layers.0.mlp", "up_proj"])
def test_an_fp8_layer_that_is_listed_as_plain_is_warned_of_once(
    key: str, listed: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("autoround_fp8"), "propagate", True)
    tensors = {W: codes(8, 8), SCALE: scales(1, 1)}
    tensors |= {name.replace("layers.0", "layers.1"): tensor for name, tensor in tensors.items()}
    source = open_source(InMemorySource(tensors), config(**{key: ["lm_head", listed, 3]}), torch.bfloat16)
    assert isinstance(source, BlockFp8Source)
    assert [r.getMessage() for r in caplog.records] == [
        f"config.json lists {listed!r} in {key}, but tensor {W!r} is stored as FP8 with a scale; it is dequantised"
    ]
    assert source.read(W).dtype == torch.bfloat16


@pytest.mark.parametrize("listed", [None, "up_proj", ["lm_head", "proj", "model.layers.0.mlp.up", "model.layers.1"]])
def test_lists_that_name_no_fp8_layer_are_silent(
    listed: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logging.getLogger("autoround_fp8"), "propagate", True)
    source = InMemorySource({W: codes(8, 8), SCALE: scales(1, 1)})
    open_source(source, config(modules_to_not_convert=listed), torch.bfloat16)
    assert not caplog.records
