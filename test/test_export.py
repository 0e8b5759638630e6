"""Which files of a source go along with the export, and what the sinks and the config block hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from autoround_fp8.checkpoint.layout import plan_layout
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import CheckpointError
from autoround_fp8.export import (
    FormatSink,
    MemorySink,
    collect_side_files,
    exported_config,
    quantization_config_file,
)
from autoround_fp8.formats.table import get_format
from autoround_fp8.model_source import open_model
from autoround_fp8.pipeline import prepare
from autoround_fp8.plan import PlannedExport
from autoround_fp8.records import QuantizedLinear
from autoround_fp8.schemes import parse_layer_config


def layer(fqn: str = "model.layers.0.mlp.up_proj") -> QuantizedLinear:
    return QuantizedLinear(
        fqn=fqn,
        weight=torch.ones(3, 2).to(torch.float8_e4m3fn),
        weight_scale=torch.tensor([[1.0], [2.0], [4.0]]),
        input_scale=torch.tensor([0.5]),
        bias=torch.ones(3),
    )


def planned(name: str, names: dict[str, str] | None = None) -> PlannedExport:
    layout = plan_layout([], [], [], 1)
    return PlannedExport(
        format=get_format(name), layout=layout, quantization_config=None, exceptions={}, names=names or {}
    )


class FakeWriter:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.written: dict[str, torch.Tensor] = {}

    def planned_dtype(self, name: str) -> torch.dtype:
        return torch.float8_e4m3fn

    def write(self, name: str, tensor: torch.Tensor) -> None:
        self.written[name] = tensor


def test_the_format_sink_writes_each_tensor_at_once() -> None:
    writer: Any = FakeWriter()
    other: Any = FakeWriter()
    sink = FormatSink((writer, planned("fp8_static")), (other, planned("llm_compressor", {"a.b": "a.c"})))
    sink.put(layer("a.b"))
    shapes = {name: tuple(tensor.shape) for name, tensor in writer.written.items()}
    assert shapes == {"a.b.weight": (3, 2), "a.b.weight_scale": (3,), "a.b.input_scale": (1,)}
    assert {name: tuple(tensor.shape) for name, tensor in other.written.items()} == {
        "a.c.weight": (3, 2),
        "a.c.weight_scale": (3, 1),
        "a.c.input_scale": (1,),
    }


def test_the_memory_sink_keeps_layers_by_name_in_order() -> None:
    sink = MemorySink()
    layers = [layer("b"), layer("a")]
    for one in layers:
        sink.put(one)
    assert list(sink.layers) == ["b", "a"]
    assert sink.layers["a"] is layers[1]


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_bytes(name.encode())


KEPT = ["LICENSE", "README.md", "chat_template.jinja", "generation_config.json", "tokenizer.model", "vocab.json"]
LEFT = [
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "tf_model.h5",
    "flax_model.msgpack",
    "model.onnx",
    "model.gguf",
    "x.pth",
    "quantization_config.json",
    "quantization_report.json",
    ".gitattributes",
]


@pytest.mark.parametrize("trust", [False, True])
def test_side_files(tmp_path: Path, trust: bool) -> None:
    write(tmp_path, *KEPT, *LEFT, "modeling_x.py")
    (tmp_path / "original").mkdir()
    files = collect_side_files(tmp_path, trust_remote_code=trust)
    kept = {name: "README.source.md" if name == "README.md" else name for name in KEPT}
    assert sorted(files) == sorted([*kept.values(), *(["modeling_x.py"] if trust else [])])
    assert all(files[new] == tmp_path / old for old, new in kept.items())


def test_an_older_card_gives_way_to_the_sources_own(tmp_path: Path) -> None:
    write(tmp_path, "README.md", "README.source.md")
    assert collect_side_files(tmp_path, trust_remote_code=False) == {"README.source.md": tmp_path / "README.md"}


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    write(tmp_path / "blobs", "abc")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "tokenizer.json").symlink_to(tmp_path / "blobs" / "abc")
    assert list(collect_side_files(tmp_path / "snapshot", trust_remote_code=False)) == ["tokenizer.json"]


def test_an_unreadable_file_is_named_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "tokenizer.json")

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: Permission denied"):
        collect_side_files(tmp_path, trust_remote_code=False)


def test_the_config_gets_exactly_one_new_block() -> None:
    source = open_model(tiny_model())
    config = QuantizeConfig(
        dataset=torch.ones(1, 4, dtype=torch.int64),
        device="cpu",
        ignore_layers=("o_proj",),
        layer_config=parse_layer_config({"down_proj": "FP8_STATIC_TENSOR"}),
    )
    plan = prepare(config, source).plan
    raw = {"model_type": "qwen3", "odd": {"é": 1}, "quantization_config": {"old": 1}}
    result = exported_config(raw, plan.exports[0].quantization_config)
    block = result["quantization_config"]
    assert {k: v for k, v in result.items() if k != "quantization_config"} == {"model_type": "qwen3", "odd": {"é": 1}}
    assert raw["quantization_config"] == {"old": 1}
    assert "old" not in block
    assert block["block_name_to_quantize"] == "model.layers"
    assert block["extra_config"]["model.layers.0.self_attn.o_proj"]["bits"] == 16
    assert block["extra_config"]["model.layers.1.mlp.down_proj"] == {"has_one_weight_scale": True}
    assert len(block["extra_config"]) == 4
    assert json.loads(quantization_config_file(block)) == block
    assert "quantization_config" not in exported_config(raw, None)


def test_bytes_of_a_source() -> None:
    model = tiny_model()
    assert open_model(model).tensors.stored_bytes == sum(2 * p.numel() for p in model.parameters())
