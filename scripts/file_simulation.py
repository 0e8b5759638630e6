"""What an FP8 checkpoint of plain Linears computes, worked out from the file alone in plain transformers.

Weights become `code * scale` in a float32 checkpoint, and hooks round what goes into each of these Linears to E4M3. An
expert inside a fused tensor has no Linear, so its inputs stay as they are. Nothing here is this package's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

FP8_MAX = 448.0


def dequantised_copy(export: Path, folder: Path) -> dict[str, torch.Tensor | None]:
    """Write an export as a float32 checkpoint; return the quantised layers with their input scale, None = dynamic."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(export.glob("*.safetensors")):
        tensors |= load_file(file)
    layers = [name.removesuffix(".weight") for name, t in tensors.items() if t.dtype == torch.float8_e4m3fn]
    input_scales: dict[str, torch.Tensor | None] = {}
    for fqn in layers:
        scale = tensors.pop(f"{fqn}.weight_scale").float().reshape(-1, 1)
        tensors[f"{fqn}.weight"] = tensors[f"{fqn}.weight"].float() * scale
        stored = tensors.pop(f"{fqn}.input_scale", None)
        input_scales[fqn] = None if stored is None else stored.float().reshape(())
    folder.mkdir(parents=True)
    for file in export.glob("*.json"):
        if file.name not in ("config.json", "quantization_config.json", "model.safetensors.index.json"):
            shutil.copy(file, folder)
    config = json.loads((export / "config.json").read_text())
    config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: t.float().contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return input_scales


def rounded(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Round `x` to E4M3 in units of `scale`, or of each token's own largest value / 448."""
    if scale is None:
        scale = x.abs().amax(-1, keepdim=True) / FP8_MAX
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype) * scale


def simulate(export: Path, work_dir: Path) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the float32 model that the file stands for, and the names of its FP8 Linears; `work_dir` must not exist.

    Raises:
        ValueError: If transformers does not find a home for every tensor.
    """
    from transformers import AutoModelForCausalLM

    input_scales = dequantised_copy(export, work_dir)
    model, info = AutoModelForCausalLM.from_pretrained(work_dir, dtype=torch.float32, output_loading_info=True)
    odd = [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    if odd:
        raise ValueError(f"{export}: tensors and model do not fit: {odd[:3]}")
    shutil.rmtree(work_dir)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name in input_scales}
    for fqn, linear in linears.items():
        scale = input_scales[fqn]
        linear.register_forward_pre_hook(lambda _, inputs, scale=scale: (rounded(inputs[0], scale),))
    return model.eval(), tuple(linears)


def largest_layer_error(model: nn.Module, simulation: nn.Module, layers: tuple[str, ...], ids: torch.Tensor) -> float:
    """Run `model` and give each of its FP8 layers' inputs to the simulation too; return the largest relative error."""
    errors: list[float] = []

    def hook(fqn: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def compare(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            expected = simulation.get_submodule(fqn)(inputs[0])
            errors.append(float((output - expected).norm() / expected.norm()))

        return compare

    handles = [model.get_submodule(fqn).register_forward_hook(hook(fqn)) for fqn in layers]
    run(model, ids)
    for handle in handles:
        handle.remove()
    return max(errors)


@torch.no_grad()
def run(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return logits `[rows, tokens, vocabulary]` in float32."""
    logits: torch.Tensor = model(input_ids=ids).logits
    return logits.float()
