"""`skeleton.py`: from config.json to a model that, filled from disk, is the one transformers would load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, PAD, VOCAB_SIZE, save_tiny_model, tiny_config
from tiny_moe_models import tiny_moe_config
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from autoround_fp8.checkpoint.materialize import fill_computed_buffers, fill_module, require_filled, tie_filled
from autoround_fp8.checkpoint.reader import CheckpointReader
from autoround_fp8.errors import CheckpointError, ConfigError, UnsupportedModelError
from autoround_fp8.models.families import REFUSED_EXPERTS
from autoround_fp8.models.name_map import map_names
from autoround_fp8.models.skeleton import (
    Skeleton,
    build_model,
    build_skeleton,
    find_blocks,
    load_config,
    shares_tied_weight,
    source_dtype,
)

CPU = torch.device("cpu")
CONTAINERS = {"gpt_neox": "gpt_neox.layers", "opt": "model.decoder.layers"}


def skeleton_of(folder: Path, dtype: torch.dtype = torch.float32) -> Skeleton:
    _, config = load_config(folder)
    return build_skeleton(config, CheckpointReader(folder).entries, dtype)


def filled(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    skeleton = skeleton_of(folder, dtype)
    fill_computed_buffers(skeleton.model, CPU)
    fill_module(skeleton.model, "", CheckpointReader(folder), skeleton.sources, CPU)
    tie_filled(skeleton.model, skeleton.model.all_tied_weights_keys)
    require_filled(skeleton.model, "the model")
    return skeleton.model


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    torch.manual_seed(1)
    return model(torch.randint(4, VOCAB_SIZE, (2, 24)), use_cache=False).logits


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def write_config(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("family", list(FAMILIES))
def test_filled_skeleton_gives_the_logits_of_from_pretrained(tmp_path: Path, family: str):
    save_tiny_model(tmp_path, family, with_tokenizer=False, dtype=torch.float32)
    assert torch.equal(logits(filled(tmp_path)), logits(loaded(tmp_path)))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_bfloat16_too(tmp_path: Path, family: str):
    save_tiny_model(tmp_path, family, with_tokenizer=False)
    mine, theirs = filled(tmp_path, torch.bfloat16), loaded(tmp_path, torch.bfloat16)
    assert torch.equal(logits(mine), logits(theirs))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_blocks_and_names_of_every_family(tmp_path: Path, family: str):
    save_tiny_model(tmp_path, family, with_tokenizer=False)
    skeleton = skeleton_of(tmp_path)
    container = CONTAINERS.get(family, "model.layers")
    count = tiny_config(family).num_hidden_layers
    assert skeleton.block_names == tuple(f"{container}.{i}" for i in range(count))
    assert skeleton.container_name == container
    assert len({type(block) for block in skeleton.blocks}) == 1
    assert set(skeleton.sources.values()) == set(CheckpointReader(tmp_path).entries)
    assert skeleton.max_positions == 256
    assert skeleton.vocab_size == VOCAB_SIZE
    assert skeleton.padding_id == PAD


@pytest.mark.parametrize(
    ("ids", "padding"),
    [((5, 1, 2), 5), ((2, 1, 2), None), ((1, 1, 2), None), ((7, 1, [2, 7]), None), ((None, 1, 2), None)],
)
def test_padding_that_also_begins_or_ends_a_text_is_no_padding(tmp_path: Path, ids: Any, padding: int | None):
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    folder = save_tiny_model(tmp_path, with_tokenizer=False)
    edit_config(folder, **dict(zip(names, ids, strict=True)))
    assert skeleton_of(folder).padding_id == padding


def test_skeleton_holds_no_weights_and_is_ready_for_inference(tmp_path: Path):
    skeleton = skeleton_of(save_tiny_model(tmp_path, with_tokenizer=False), torch.bfloat16)
    assert {p.device.type for p in skeleton.model.parameters()} == {"meta"}
    assert {p.dtype for p in skeleton.model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in skeleton.model.parameters())
    assert not skeleton.model.training


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "opt"])
def test_tied_embeddings(tmp_path: Path, family: str):
    save_tiny_model(tmp_path, family, with_tokenizer=False, dtype=torch.float32, tie_word_embeddings=True)
    assert "lm_head.weight" not in CheckpointReader(tmp_path).entries
    model = filled(tmp_path)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(logits(model), logits(loaded(tmp_path)))
    assert shares_tied_weight(model, "lm_head.weight")
    assert not shares_tied_weight(model, "model.norm.weight")


def test_tied_model_with_only_the_head_on_disk(tmp_path: Path):
    save_tiny_model(tmp_path, with_tokenizer=False, dtype=torch.float32, tie_word_embeddings=True)
    expected = logits(loaded(tmp_path))
    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert torch.equal(logits(filled(tmp_path)), expected)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_missing_tensor_is_named(tmp_path: Path, name: str):
    save_tiny_model(tmp_path, with_tokenizer=False)
    edit_weights(tmp_path, lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensors of Qwen3ForCausalLM, first '{name}'"):
        skeleton_of(tmp_path)


def test_tensors_the_model_does_not_have_are_left_alone(tmp_path: Path):
    save_tiny_model(tmp_path, with_tokenizer=False)
    edit_weights(tmp_path, lambda t: t.update({"mtp.extra.weight": torch.ones(2)}))
    assert "mtp.extra.weight" not in skeleton_of(tmp_path).sources.values()


def test_names_without_the_base_prefix_are_mapped(tmp_path: Path):
    save_tiny_model(tmp_path, with_tokenizer=False, dtype=torch.float32)
    expected = logits(loaded(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    skeleton = skeleton_of(tmp_path)
    assert skeleton.sources["model.norm.weight"] == "norm.weight"
    assert torch.equal(logits(filled(tmp_path)), expected)


def test_two_tensors_for_one_parameter_are_refused(tmp_path: Path):
    skeleton = skeleton_of(save_tiny_model(tmp_path, with_tokenizer=False))
    names = [*CheckpointReader(tmp_path).entries, "norm.weight"]
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' and 'norm\.weight' both belong to parameter"):
        map_names(skeleton.model, names, {})


def test_config_keeps_the_raw_json_and_drops_the_quantization(tmp_path: Path):
    save_tiny_model(tmp_path, with_tokenizer=False)
    edit_config(tmp_path, custom_field={"a": 1}, quantization_config={"quant_method": "gptq", "bits": 4})
    raw, config = load_config(tmp_path)
    assert raw == json.loads((tmp_path / "config.json").read_text())
    assert not hasattr(config, "quantization_config")


def test_own_code_is_never_run_unasked_and_the_flag_is_named(tmp_path: Path):
    (tmp_path / "configuration_x.py").write_text("raise SystemExit('code was run')")
    write_config(tmp_path, model_type="my_own", auto_map={"AutoConfig": "configuration_x.XConfig"})
    with pytest.raises(ConfigError, match=r"'my_own'.*--trust_remote_code \(off by default"):
        load_config(tmp_path)


def test_known_type_with_own_code_uses_transformers_code(tmp_path: Path):
    save_tiny_model(tmp_path, with_tokenizer=False)
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('code was run')")
    edit_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    assert type(skeleton_of(tmp_path).model).__module__.startswith("transformers.")


@pytest.mark.parametrize("model_type", ["no_such_model", None, "", ["qwen3"], {"a": 1}])
def test_unknown_model_type_is_named(tmp_path: Path, model_type: Any):
    write_config(tmp_path, model_type=model_type)
    with pytest.raises(UnsupportedModelError, match="is not known to the installed transformers") as error:
        load_config(tmp_path)
    assert repr(model_type) in str(error.value)


def test_gpt2_is_refused_with_the_reason(tmp_path: Path):
    write_config(tmp_path, model_type="gpt2")
    with pytest.raises(UnsupportedModelError, match="'gpt2' is not supported: its layers are Conv1D"):
        load_config(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "3", ""])
def test_broken_config_names_the_file(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_config(tmp_path)


def test_missing_config_and_bad_fields(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        load_config(tmp_path)
    write_config(tmp_path, model_type="qwen3", hidden_size="many")
    with pytest.raises(CheckpointError, match=r"transformers cannot read .*config\.json"):
        load_config(tmp_path)


def test_model_that_is_no_causal_language_model(tmp_path: Path):
    write_config(tmp_path, model_type="vit")
    _, config = load_config(tmp_path)
    with pytest.raises(UnsupportedModelError, match="no causal language model for model_type 'vit'") as error:
        build_skeleton(config, [], torch.bfloat16)
    assert "class" not in str(error.value)


@pytest.mark.parametrize("model_type", ["step3p5", "step3p7"])
def test_step3_is_refused_with_the_reason(tmp_path: Path, model_type: str):
    write_config(tmp_path, model_type=model_type)
    with pytest.raises(UnsupportedModelError, match=f"'{model_type}' is not supported: each layer clamps"):
        load_config(tmp_path)


def test_the_reason_of_refused_experts_comes_before_odd_blocks():
    fields = {"hidden_size": 64, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48, "num_attention_heads": 4}
    fields |= {"num_layers": 2, "num_hidden_layers": 4, "n_routed_experts": 8, "zero_expert_num": 2, "vocab_size": 128}
    config = AutoConfig.for_model("longcat_flash", **fields)
    with pytest.raises(UnsupportedModelError, match=REFUSED_EXPERTS["LongcatFlashExperts"]):
        build_skeleton(config, [], torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "cause"),
    [
        (tiny_moe_config("mixtral", num_local_experts=-1), r"'mixtral'.*RuntimeError: .*negative dimension -1"),
        (tiny_config("qwen3", num_attention_heads=0), "'qwen3'.*ZeroDivisionError: "),
        (tiny_config("qwen3", hidden_act="nope"), "'qwen3'.*KeyError: 'nope'"),
        (tiny_config("qwen3", pad_token_id=1000), "'qwen3'.*AssertionError: Padding_idx"),
        (tiny_config("qwen3", text_config={"a": 1}), "'qwen3'.*AttributeError: 'dict' object"),
        (tiny_config("llama", rope_parameters={"rope_type": "default", "rope_theta": None}), "'llama'.*TypeError: "),
    ],
)
def test_values_that_make_no_model_are_one_sentence(config: Any, cause: str):
    with pytest.raises(CheckpointError, match=rf"^transformers cannot build a model of model_type {cause}") as error:
        build_model(config, torch.bfloat16)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text_config", [{"quantization_config": {}}, [], "x"])
def test_a_text_config_that_the_type_does_not_have_is_refused(tmp_path: Path, text_config: Any):
    write_config(tmp_path, **tiny_config("qwen3").to_dict(), text_config=text_config)
    with pytest.raises(CheckpointError, match="nested config of the text model, which model_type 'qwen3' does not"):
        load_config(tmp_path)


def test_a_model_without_layers_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"num_hidden_layers \(0\)"):
        build_skeleton(tiny_config("qwen3", num_hidden_layers=0), [], torch.bfloat16)


def test_blocks_that_cannot_be_told_are_refused():
    class Two(nn.Module):
        def __init__(self, count: int):
            super().__init__()
            for i in range(count):
                setattr(self, f"list{i}", nn.ModuleList(nn.Linear(2, 2) for _ in range(2)))

    config = tiny_config("qwen3")
    with pytest.raises(UnsupportedModelError, match=r"'qwen3': 0 lists with num_hidden_layers \(2\)"):
        find_blocks(Two(0), config)
    with pytest.raises(UnsupportedModelError, match=r"2 lists.*list0, list1"):
        find_blocks(Two(2), config)
    assert find_blocks(Two(1), config) == ("list0.0", "list0.1")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"torch_dtype": "torch.float32"}, torch.float32),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, torch.bfloat16),
        ({"text_config": {"dtype": "float16"}}, torch.float16),
    ],
)
def test_source_dtype(fields: dict[str, Any], expected: torch.dtype):
    assert source_dtype(fields) == expected


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "nonsense", "nn", 16])
def test_source_dtype_refuses_others_by_name(name: Any):
    with pytest.raises(CheckpointError, match="is not bfloat16, float16 or float32") as error:
        source_dtype({"dtype": name})
    assert repr(name) in str(error.value)
