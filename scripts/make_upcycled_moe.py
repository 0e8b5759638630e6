"""Turn a small dense Llama-style model into a Mixtral mixture of experts that still writes sensible text.

Every expert is the dense feed-forward with its own few percent of Gaussian noise, and the router is random, so the
result behaves like the dense model while its experts differ and see different tokens. Weights go from folder to folder
one tensor at a time; only finding balanced routers runs the dense model, once, on a little built-in text.

    python scripts/make_upcycled_moe.py /tmp/models/smollm2 /tmp/models/upcycled
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import zlib
from itertools import islice
from pathlib import Path
from typing import Any

# The source is a folder; nothing here may wait for a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from autoround_fp8.calibration.builtin_text import iter_builtin_texts
from autoround_fp8.checkpoint.layout import PlannedTensor, parse_size, plan_layout
from autoround_fp8.checkpoint.reader import CheckpointReader, read_json
from autoround_fp8.checkpoint.writer import CONFIG_FILE, REPORT_FILE, CheckpointWriter
from autoround_fp8.errors import AutoRoundError, ConfigError

# Mixtral's name of each projection: w1 is activated, w3 is multiplied with it, w2 leads back.
EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
# Tokenizer, chat template, generation settings, licence.
COPIED_FILES = ("*token*", "*vocab*", "merges.txt", "chat_template*", "generation_config.json", "LICENSE*")
_DENSE_WEIGHT = re.compile(r"(model\.layers\.\d+)\.mlp\.(gate_proj|up_proj|down_proj)\.weight")
# What both architectures mean alike; older configs have rope_theta and rope_scaling, newer ones rope_parameters.
SHARED_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("use_cache", "attention_dropout", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("rope_parameters", "rope_theta", "rope_scaling"),
)
# With 8 normal logits of this deviation, the first of two experts gets about 3/4 of the weight.
LOGIT_STD = 2.0
NUM_TEXTS, NUM_TOKENS = 8, 256


def make_config(dense: dict[str, Any], num_experts: int, top_k: int) -> dict[str, Any]:
    """Mixtral's config.json from the dense model's.

    Raises:
        ConfigError: If the dense model has parts that Mixtral lacks.
    """
    if dense.get("model_type") != "llama" or dense.get("attention_bias") or dense.get("mlp_bias"):
        raise ConfigError(f"model_type ({dense.get('model_type')!r}) must be 'llama', without attention or MLP biases")
    if not 1 <= top_k <= num_experts:
        raise ConfigError(f"top_k ({top_k}) must be at least 1 and at most the number of experts ({num_experts})")
    own = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "bfloat16",
        "num_local_experts": num_experts,
        "num_experts_per_tok": top_k,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
    }
    return {key: dense[key] for key in SHARED_FIELDS if key in dense} | own


def make_generator(seed: int, name: str) -> torch.Generator:
    """A generator for one tensor, so that no tensor's values depend on the order of the others."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))


def draw_router(x_TH: torch.Tensor, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    """Draws one layer's router for its inputs `x_TH` (tokens, hidden), float32.

    Router inputs have a large mean, which gives a plain random router the same favourites for all tokens. Without its
    part along the mean, SmolLM2's experts see 5% (least used, mean of the layers) to 23% (most used) of Wikipedia's
    slots instead of 2% to 29%.

    Returns:
        Normal weights `[experts, hidden]`, orthogonal to the mean input; logits deviate by `LOGIT_STD`.
    """
    mean_H = torch.nn.functional.normalize(x_TH.mean(dim=0), dim=0)
    router_EH = torch.randn(num_experts, x_TH.shape[-1], generator=generator)
    router_EH -= torch.outer(router_EH @ mean_H, mean_H)
    return router_EH * (LOGIT_STD / (x_TH @ router_EH.T).std())


@torch.no_grad()
def draw_routers(source: Path, num_experts: int, seed: int) -> dict[str, torch.Tensor]:
    """Runs the dense model on built-in text and draws every layer's router: name in the Mixtral folder -> weight."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    routers: dict[str, torch.Tensor] = {}

    def record(name: str, x: torch.Tensor) -> None:
        router = draw_router(x.flatten(0, -2), num_experts, make_generator(seed, name))
        routers[name] = router.to(torch.bfloat16)

    for index, layer in enumerate(model.model.layers):
        name = f"model.layers.{index}.block_sparse_moe.gate.weight"
        layer.post_attention_layernorm.register_forward_hook(lambda _, __, x, name=name: record(name, x))
    rows = (tokenizer(text)["input_ids"][:NUM_TOKENS] for text in iter_builtin_texts(seed))
    model.model(torch.tensor(list(islice((ids for ids in rows if len(ids) == NUM_TOKENS), NUM_TEXTS))))
    return routers


def expert_names(name: str, num_experts: int) -> list[str]:
    """What replaces a dense weight: one name per expert, or nothing if `name` is no feed-forward weight."""
    match = _DENSE_WEIGHT.fullmatch(name)
    if match is None:
        return []
    leaf = EXPERT_NAMES[match[2]]
    return [f"{match[1]}.block_sparse_moe.experts.{expert}.{leaf}.weight" for expert in range(num_experts)]


def plan_tensors(reader: CheckpointReader, routers: dict[str, torch.Tensor], num_experts: int) -> list[PlannedTensor]:
    """Every tensor of the Mixtral folder; those with a source are copied byte for byte.

    Raises:
        ConfigError: If the source is not all bfloat16.
    """
    planned = [PlannedTensor(name=name, dtype="BF16", shape=tuple(router.shape)) for name, router in routers.items()]
    for name, entry in reader.entries.items():
        if entry.dtype != "BF16":
            raise ConfigError(f"dtype ({entry.dtype}) of {name!r} must be BF16")
        experts = expert_names(name, num_experts)
        planned += [PlannedTensor(name=expert, dtype="BF16", shape=entry.shape) for expert in experts]
        if not experts:
            planned.append(PlannedTensor(name=name, dtype="BF16", shape=entry.shape, source=name))
    return planned


def write_experts(
    reader: CheckpointReader, writer: CheckpointWriter, num_experts: int, noise: float, seed: int
) -> None:
    """Writes every expert: the dense weight times `1 + noise * N(0, 1)`, element by element."""
    for name in reader.names:
        experts = expert_names(name, num_experts)
        if not experts:
            continue
        dense = reader.read(name).float()
        for expert in experts:
            factor = torch.randn(dense.shape, generator=make_generator(seed, expert)).mul_(noise).add_(1.0)
            writer.write(expert, factor.mul_(dense).to(torch.bfloat16))


def make_upcycled_moe(args: argparse.Namespace) -> int:
    """Writes the Mixtral folder; returns its weights' size in bytes."""
    reader = CheckpointReader(args.source)
    config = make_config(read_json(args.source / CONFIG_FILE), args.experts, args.top_k)
    routers = draw_routers(args.source, args.experts, args.seed)
    dense_names = [name for name in reader.names if expert_names(name, args.experts)]
    if len(dense_names) != len(EXPERT_NAMES) * len(routers):
        raise ConfigError(f"feed-forward weights ({len(dense_names)}) of {args.source} must be 3 per layer")
    planned = plan_tensors(reader, routers, args.experts)
    layout = plan_layout(planned, reader.names, dense_names, parse_size(args.max_shard_size))
    side_files = {path.name: path for pattern in COPIED_FILES for path in args.source.glob(pattern)}
    writer = CheckpointWriter(args.target, layout, side_files)
    try:
        for name, router in routers.items():
            writer.write(name, router)
        write_experts(reader, writer, args.experts, args.noise, args.seed)
        writer.copy_rest(reader)
        writer.finish(config, {})
    except BaseException:
        writer.abort()
        raise
    # An ordinary release has no report of a quantisation.
    (args.target / REPORT_FILE).unlink()
    return layout.num_bytes


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and build one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="dense bfloat16 folder with model_type llama")
    parser.add_argument("target", type=Path, help="folder to create")
    parser.add_argument("--experts", type=int, default=8, help="experts per layer (8)")
    parser.add_argument("--noise", type=float, default=0.03, help="relative noise of each expert's weights (0.03)")
    parser.add_argument("--top_k", type=int, default=2, help="experts per token (2)")
    parser.add_argument("--max_shard_size", default="1GB", help="largest weight file (1GB)")
    parser.add_argument("--seed", type=int, default=0, help="seed of noise and routers (0)")
    args = parser.parse_args(argv)
    try:
        num_bytes = make_upcycled_moe(args)
    except (OSError, AutoRoundError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    print(f"{args.target}: {num_bytes / 1e9:.2f} GB written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
