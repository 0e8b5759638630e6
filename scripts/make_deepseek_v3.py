"""Write a synthetic DeepSeek-V3 checkpoint: random weights, but names, dtypes, block FP8 and config as released.

By default the sizes are those of a model of roughly a tenth of the real widths, and deliberately not all multiples of
128, so that partial blocks occur. Every tensor is drawn, coded and written by itself, so memory does not grow with the
model. Its text makes no sense; what it is for is loading, quantising and measuring memory at any size.

    python scripts/make_deepseek_v3.py /tmp/models/deepseek --layers 8 --mtp
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from autoround_fp8.calibration.builtin_text import iter_builtin_texts
from autoround_fp8.checkpoint.layout import PlannedTensor, parse_size, plan_layout
from autoround_fp8.checkpoint.writer import REPORT_FILE, CheckpointWriter
from autoround_fp8.errors import AutoRoundError, ConfigError
from autoround_fp8.numerics.fp8 import FP8_MAX, quantize_fp8

BLOCK = 128
BOS, EOS = 0, 1
SPECIAL_TOKENS = ("<bos>", "<eos>")
NUM_TOKENIZER_TEXTS = 40
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
# A block's factor is 2**u, u uniform in this range: reading a block with its neighbour's scale gives wrong values.
LOG2_BLOCK_RANGE = (-3.0, 1.0)

# Option -> (field of config.json, default, meaning).
SIZES: dict[str, tuple[str, int, str]] = {
    "layers": ("num_hidden_layers", 8, "decoder layers, without the MTP layer"),
    "dense_layers": ("first_k_dense_replace", 1, "first layers without experts"),
    "experts": ("n_routed_experts", 64, "routed experts per layer"),
    "experts_per_token": ("num_experts_per_tok", 4, "routed experts per token"),
    "shared_experts": ("n_shared_experts", 1, "experts that see every token"),
    "groups": ("n_group", 4, "groups of experts"),
    "topk_group": ("topk_group", 2, "groups per token"),
    "hidden": ("hidden_size", 1024, "width of the residual stream"),
    "intermediate": ("intermediate_size", 2560, "width of the dense layers' feed-forward"),
    "moe_intermediate": ("moe_intermediate_size", 512, "width of one expert"),
    "heads": ("num_attention_heads", 16, "attention heads"),
    "q_lora_rank": ("q_lora_rank", 384, "width of the compressed queries"),
    "kv_lora_rank": ("kv_lora_rank", 192, "width of the compressed keys and values"),
    "qk_nope_head_dim": ("qk_nope_head_dim", 64, "a head's part without rotary embedding"),
    "qk_rope_head_dim": ("qk_rope_head_dim", 32, "a head's part with rotary embedding"),
    "v_head_dim": ("v_head_dim", 64, "width of a head's values"),
    "vocab": ("vocab_size", 2048, "tokens"),
}


@dataclass(frozen=True, kw_only=True)
class RandomTensor:
    """One tensor to draw: normal with this mean and deviation, in safetensors' dtype.

    With `has_uneven_blocks`, every block of the matrix gets a factor of its own; their mean square is 1.
    """

    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    dtype: str = "BF16"
    has_uneven_blocks: bool = False

    @property
    def is_fp8(self) -> bool:
        """Whether the tensor is stored as codes and `weight_scale_inv`."""
        return self.dtype == "F8_E4M3"

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of the block scales; blocks at the right and lower edges may be partial."""
        return tuple(math.ceil(size / BLOCK) for size in self.shape)


def make_config(args: argparse.Namespace) -> dict[str, Any]:
    """config.json in the released model's older spelling (`rope_theta`, `rope_scaling`, `torch_dtype`).

    Raises:
        ConfigError: If a size is not positive, or routing is impossible with these sizes.
    """
    sizes = {field: getattr(args, option) for option, (field, _, _) in SIZES.items()}
    for option in SIZES:
        least = 0 if option == "dense_layers" else 1
        if getattr(args, option) < least:
            raise ConfigError(f"--{option} ({getattr(args, option)}) must be at least {least}")
    if args.experts % args.groups or args.experts // args.groups < 2 or args.topk_group > args.groups:
        raise ConfigError(
            f"--experts ({args.experts}) must be at least 2 in each of --groups ({args.groups}), the same number in "
            f"all, and --topk_group ({args.topk_group}) at most that many groups"
        )
    if args.experts_per_token > args.topk_group * (args.experts // args.groups):
        raise ConfigError(f"--experts_per_token ({args.experts_per_token}) is more than --topk_group groups hold")
    config = sizes | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "ep_size": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 16384,
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": args.heads,
        "num_nextn_predict_layers": int(args.mtp),
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 4,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    if args.dtype == "fp8":
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        }
    return config


def linear(out_features: int, in_features: int, dtype: str | None = None) -> RandomTensor:
    """A weight that keeps the size of what goes through it; without a dtype it is one that releases leave in BF16."""
    shape, std = (out_features, in_features), in_features**-0.5
    return RandomTensor(shape=shape, std=std, dtype=dtype or "BF16", has_uneven_blocks=dtype is not None)


def norm(size: int) -> RandomTensor:
    """A norm's weight, not all ones."""
    return RandomTensor(shape=(size,), std=0.1, mean=1.0)


def feed_forward(prefix: str, hidden: int, intermediate: int, dtype: str) -> Iterator[tuple[str, RandomTensor]]:
    """The three weights of a dense feed-forward or of one expert."""
    yield f"{prefix}.gate_proj.weight", linear(intermediate, hidden, dtype)
    yield f"{prefix}.up_proj.weight", linear(intermediate, hidden, dtype)
    yield f"{prefix}.down_proj.weight", linear(hidden, intermediate, dtype)


def attention(prefix: str, config: dict[str, Any], dtype: str) -> Iterator[tuple[str, RandomTensor]]:
    """Multi-head latent attention."""
    hidden, heads, q_rank = config["hidden_size"], config["num_attention_heads"], config["q_lora_rank"]
    kv_rank, nope, rope = config["kv_lora_rank"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    yield f"{prefix}.q_a_proj.weight", linear(q_rank, hidden, dtype)
    yield f"{prefix}.q_a_layernorm.weight", norm(q_rank)
    yield f"{prefix}.q_b_proj.weight", linear(heads * (nope + rope), q_rank, dtype)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", linear(kv_rank + rope, hidden, dtype)
    yield f"{prefix}.kv_a_layernorm.weight", norm(kv_rank)
    yield f"{prefix}.kv_b_proj.weight", linear(heads * (nope + config["v_head_dim"]), kv_rank, dtype)
    yield f"{prefix}.o_proj.weight", linear(hidden, heads * config["v_head_dim"], dtype)


def decoder_layer(index: int, config: dict[str, Any], dtype: str) -> Iterator[tuple[str, RandomTensor]]:
    """One decoder layer: dense below `first_k_dense_replace`, else with router, routed and shared experts."""
    prefix, hidden, width = f"model.layers.{index}", config["hidden_size"], config["moe_intermediate_size"]
    yield f"{prefix}.input_layernorm.weight", norm(hidden)
    yield f"{prefix}.post_attention_layernorm.weight", norm(hidden)
    yield from attention(f"{prefix}.self_attn", config, dtype)
    if index < config["first_k_dense_replace"]:
        yield from feed_forward(f"{prefix}.mlp", hidden, config["intermediate_size"], dtype)
        return
    num_experts = config["n_routed_experts"]
    yield f"{prefix}.mlp.gate.weight", linear(num_experts, hidden)
    # Small beside the spread of the sigmoid scores, so that the bias decides only close calls.
    yield f"{prefix}.mlp.gate.e_score_correction_bias", RandomTensor(shape=(num_experts,), std=0.05, dtype="F32")
    for expert in range(num_experts):
        yield from feed_forward(f"{prefix}.mlp.experts.{expert}", hidden, width, dtype)
    yield from feed_forward(f"{prefix}.mlp.shared_experts", hidden, width * config["n_shared_experts"], dtype)


def mtp_layer(index: int, config: dict[str, Any], dtype: str) -> Iterator[tuple[str, RandomTensor]]:
    """The multi-token-prediction layer behind the last decoder layer, with its own embedding and head as released."""
    prefix, hidden, vocab = f"model.layers.{index}", config["hidden_size"], config["vocab_size"]
    yield from decoder_layer(index, config, dtype)
    yield f"{prefix}.embed_tokens.weight", RandomTensor(shape=(vocab, hidden), std=1.0)
    yield f"{prefix}.enorm.weight", norm(hidden)
    yield f"{prefix}.hnorm.weight", norm(hidden)
    yield f"{prefix}.eh_proj.weight", linear(hidden, 2 * hidden)
    yield f"{prefix}.shared_head.norm.weight", norm(hidden)
    yield f"{prefix}.shared_head.head.weight", linear(vocab, hidden)


def list_tensors(config: dict[str, Any]) -> dict[str, RandomTensor]:
    """Every weight of the checkpoint by name; block scales are not listed."""
    hidden, vocab, num_layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    dtype = "F8_E4M3" if "quantization_config" in config else "BF16"
    tensors = {"model.embed_tokens.weight": RandomTensor(shape=(vocab, hidden), std=1.0)}
    for index in range(num_layers):
        tensors |= decoder_layer(index, config, dtype)
    for index in range(num_layers, num_layers + config["num_nextn_predict_layers"]):
        tensors |= mtp_layer(index, config, dtype)
    return tensors | {"model.norm.weight": norm(hidden), "lm_head.weight": linear(vocab, hidden)}


def plan_tensors(tensors: dict[str, RandomTensor]) -> Iterator[PlannedTensor]:
    """What is written for these weights: FP8 weights come with `<name>_scale_inv`, a multiplier despite its name."""
    for name, tensor in tensors.items():
        yield PlannedTensor(name=name, dtype=tensor.dtype, shape=tensor.shape)
        if tensor.is_fp8:
            yield PlannedTensor(name=f"{name}_scale_inv", dtype="F32", shape=tensor.grid)


def draw(name: str, tensor: RandomTensor, seed: int) -> torch.Tensor:
    """The tensor's values in float32; they depend on its name, shape and seed only, so both dtypes mean one model."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    values = torch.randn(tensor.shape, generator=generator).mul_(tensor.std)
    if tensor.mean:
        values.add_(tensor.mean)
    if tensor.has_uneven_blocks:
        low, high = LOG2_BLOCK_RANGE
        factors = torch.empty(tensor.grid).uniform_(low, high, generator=generator).exp2_()
        mean_square = (4**high - 4**low) / (math.log(4) * (high - low))
        factors /= math.sqrt(mean_square)
        # Strips of 128 rows: one multiplication each, and no second matrix of factors.
        for row, strip in enumerate(values.split(BLOCK)):
            strip.mul_(factors[row].repeat_interleave(BLOCK)[: strip.shape[1]])
    return values


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes a matrix in blocks of 128 x 128, each with the scale amax / 448.

    Args:
        weight: Float32 `[out, in]`, no block all zero.

    Returns:
        E4M3 codes `[out, in]` and float32 scales `[ceil(out / 128), ceil(in / 128)]`.
    """
    num_columns = math.ceil(weight.shape[1] / BLOCK)
    codes, scales = [], []
    for strip in weight.split(BLOCK):
        padded = torch.nn.functional.pad(strip, (0, num_columns * BLOCK - strip.shape[1]))
        blocks = padded.view(len(strip), num_columns, BLOCK)
        scale = blocks.abs().amax(dim=(0, 2)) / FP8_MAX
        codes.append(quantize_fp8(blocks, scale[:, None]).view(len(strip), -1)[:, : strip.shape[1]])
        scales.append(scale)
    # As bytes, since not every operation knows FP8.
    joined = torch.cat([strip.view(torch.uint8) for strip in codes]).view(torch.float8_e4m3fn)
    return joined, torch.stack(scales)


def save_tokenizer(folder: Path, vocab_size: int, seed: int) -> None:
    """Trains a byte-level tokenizer with at most `vocab_size` tokens on built-in text and saves it.

    Raises:
        ConfigError: If the vocabulary has no room for all bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(SPECIAL_TOKENS):
        raise ConfigError(f"--vocab ({vocab_size}) must be at least {len(alphabet) + len(SPECIAL_TOKENS)}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(islice(iter_builtin_texts(seed), NUM_TOKENIZER_TEXTS), trainer)
    bos, eos = SPECIAL_TOKENS
    backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, BOS)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=eos)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)


def write_tensors(writer: CheckpointWriter, tensors: dict[str, RandomTensor], seed: int) -> None:
    """Draws and writes every tensor in turn."""
    for name, tensor in tensors.items():
        values = draw(name, tensor, seed)
        if tensor.is_fp8:
            codes, scales = quantize_blocks(values)
            writer.write(name, codes)
            writer.write(f"{name}_scale_inv", scales)
        else:
            writer.write(name, values if tensor.dtype == "F32" else values.to(torch.bfloat16))


def make_deepseek_v3(args: argparse.Namespace) -> int:
    """Writes the checkpoint folder; returns its weights' size in bytes."""
    config = make_config(args)
    tensors = list_tensors(config)
    layout = plan_layout(plan_tensors(tensors), (), (), parse_size(args.max_shard_size))
    generation = {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": False}
    with tempfile.TemporaryDirectory() as scratch:
        save_tokenizer(Path(scratch), args.vocab, args.seed)
        (Path(scratch) / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        writer = CheckpointWriter(args.target, layout, {path.name: path for path in Path(scratch).iterdir()})
        try:
            write_tensors(writer, tensors, args.seed)
            writer.finish(config, {})
        except BaseException:
            writer.abort()
            raise
    # An ordinary release has no report of a quantisation.
    (args.target / REPORT_FILE).unlink()
    return layout.num_bytes


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and write one checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="folder to create")
    for option, (field, default, meaning) in SIZES.items():
        parser.add_argument(f"--{option}", type=int, default=default, help=f"{meaning}: {field} ({default})")
    parser.add_argument("--mtp", action="store_true", help="add a multi-token-prediction layer behind the last one")
    parser.add_argument("--dtype", choices=["fp8", "bf16"], default="fp8", help="the linear weights' dtype (fp8)")
    parser.add_argument("--max_shard_size", default="500MB", help="largest weight file (500MB)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all weights (0)")
    args = parser.parse_args(argv)
    try:
        num_bytes = make_deepseek_v3(args)
    except (OSError, AutoRoundError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"{args.target}: {num_bytes / 1e9:.2f} GB written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
