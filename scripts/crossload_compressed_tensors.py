"""Load an `llm_compressor` export with transformers and compressed-tensors instead of this package, and compare.

Run it with the python of an environment that has transformers and compressed-tensors, not this package. First every
FP8 layer is given random inputs and must compute what the file's codes and scales say; then the logits are compared,
options as of `crossload_intel.py`. Logits of two right loaders differ too: the order of float operations moves inputs
across rounding steps, which grows from layer to layer. For dense models: transformers runs experts as one 3-D
parameter, which compressed-tensors leaves alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from crossload_intel import main
from safetensors.torch import load_file

NUM_TOKENS = 8


def expected_output(x: torch.Tensor, tensors: dict[str, torch.Tensor], fqn: str) -> torch.Tensor:
    """Return what the file says the layer computes for `[..., in]`, in float32: both sides rounded, then multiplied."""
    weight = tensors[f"{fqn}.weight"].float() * tensors[f"{fqn}.weight_scale"].reshape(-1, 1).float()
    scale = tensors.get(f"{fqn}.input_scale")
    if scale is None:
        scale = x.abs().amax(-1, keepdim=True) / 448
    rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    bias = tensors.get(f"{fqn}.bias")
    return torch.nn.functional.linear(rounded, weight, None if bias is None else bias.float())


@torch.no_grad()
def check_layers(model_dir: Path) -> str:
    """Return how many FP8 layers there are and their largest relative error; raise ValueError if one is wrong."""
    from transformers import AutoModelForCausalLM

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        tensors.update(load_file(path))
    wanted = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, device_map="cpu").eval()
    model(input_ids=torch.zeros(1, 1, dtype=torch.long))  # weights are decompressed at the first forward
    layers = {name: m for name, m in model.named_modules() if getattr(m, "quantization_scheme", None) is not None}
    if layers.keys() != wanted:
        odd = sorted(layers.keys() ^ wanted)
        raise ValueError(f"{len(odd)} layers are FP8 in the file or in the loaded model only, first {odd[0]!r}")
    worst = 0.0
    for fqn, layer in layers.items():
        x = torch.randn(1, NUM_TOKENS, layer.in_features)  # compressed-tensors knows tokens by the second dimension
        expected = expected_output(x, tensors, fqn)
        error = float((layer(x) - expected).norm() / expected.norm())
        if not error < 1e-5:
            raise ValueError(f"relative error ({error:.2e}) of {fqn!r} must be below 1e-5")
        worst = max(worst, error)
    return f"{len(layers)} FP8 layers compute what the file says, largest relative error {worst:.1e}"


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        print(check_layers(Path(sys.argv[1])))
    raise SystemExit(main(package="compressed_tensors", description=__doc__))
