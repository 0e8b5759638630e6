"""One independent judge for static FP8 exports of any tool, in plain transformers float32 with no tool's own code.

An export is simulated inside its original: each quantised Linear gets the dequantised weight and rounds its input to
E4M3. The original runs once per window for several exports, and what an export shares with it is held only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call

FP8_MAX = 448.0
# How much of dequantised weights is held at once; with one more original and its logits this stays below 6 GB for
# models of up to 0.3 billion parameters.
HELD_EXPORT_BYTES = 1.8e9
# Rows of logits that are compared at once, which bounds the temporaries for large vocabularies.
ROWS_AT_ONCE = 128


@dataclass(frozen=True, kw_only=True)
class WindowScore:
    """How far an export is from the original on one window: sums over its tokens, in nats.

    The losses are those of the next token, so they sum over one token less.
    """

    kl_sum: float
    num_agreeing: int
    loss_sum: float
    original_loss_sum: float
    num_tokens: int

    @property
    def kl(self) -> float:
        """KL(original || export) per token."""
        return self.kl_sum / self.num_tokens


@dataclass(frozen=True, kw_only=True)
class SimulatedExport:
    """What an export changes in its original: float32 tensors by name, and input scales by name of the Linear."""

    replaced: dict[str, torch.Tensor]
    input_scales: dict[str, torch.Tensor]


def load_float32(model: str | Path) -> nn.Module:
    """Load an original in float32, ready to evaluate."""
    from transformers import AutoModelForCausalLM

    original: nn.Module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return original


def read_export(folder: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of an export; the peer nests its files one folder deeper, so the search is recursive.

    Raises:
        FileNotFoundError: if there is no safetensors file.
    """
    from safetensors.torch import load_file

    files = sorted(folder.rglob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors file")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    return tensors


def simulate_export(folder: Path, original: nn.Module) -> SimulatedExport:
    """Read an export as changes to its original. Unquantised tensors count too: an export may have spoilt one.

    Weight scales are multipliers of shape `[out]`, `[out, 1]`, `[1]` or `[]`, input scales single multipliers.

    Raises:
        ValueError: if the export quantises nothing, leaves a quantised layer without static scales, or has tensors that
            do not fit the original.
    """
    tensors = read_export(folder)
    fqns = [name.removesuffix(".weight") for name, t in tensors.items() if t.dtype == torch.float8_e4m3fn]
    missing = [fqn for fqn in fqns for name in ("weight_scale", "input_scale") if f"{fqn}.{name}" not in tensors]
    if not fqns or missing:
        raise ValueError(
            f"{folder}: quantised layers ({len(fqns)}) must all have static scales; missing: {missing[:3]}"
        )
    # Cloned: a tensor read from a file keeps all of the file in memory.
    input_scales = {fqn: tensors.pop(f"{fqn}.input_scale").float().reshape(()).clone() for fqn in fqns}
    weight_scales = {fqn: tensors.pop(f"{fqn}.weight_scale").float().reshape(-1, 1) for fqn in fqns}
    known = original.state_dict(keep_vars=True)
    misfits = [name for name, t in tensors.items() if name not in known or t.shape != known[name].shape]
    if misfits:
        raise ValueError(f"{folder}: tensors that the model does not have in this shape: {misfits[:3]}")
    replaced = {f"{fqn}.weight": tensors[f"{fqn}.weight"].float() * scale for fqn, scale in weight_scales.items()}
    for name in tensors.keys() - replaced.keys():
        value = tensors[name].float()
        if not torch.equal(value, known[name]):
            # A tied parameter is written under one of its names; the others follow unless the export has them too.
            tied = [other for other, t in known.items() if t is known[name] and other not in tensors]
            replaced |= dict.fromkeys([name, *tied], value)
    return SimulatedExport(replaced=replaced, input_scales=input_scales)


def fake_quantise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Round float32 `x` to E4M3 in units of a per-tensor `scale`; what is out of range saturates at 448."""
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale


@contextmanager
def inputs_rounded(model: nn.Module, input_scales: dict[str, torch.Tensor]) -> Iterator[None]:
    """Inside the `with`, the named layers round their inputs to E4M3."""

    def rounding(scale: torch.Tensor) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
        return lambda _, inputs: (fake_quantise(inputs[0], scale), *inputs[1:])

    handles = [
        model.get_submodule(fqn).register_forward_pre_hook(rounding(scale)) for fqn, scale in input_scales.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_simulated(original: nn.Module, export: SimulatedExport, ids: torch.Tensor) -> torch.Tensor:
    """Return the export's float32 logits `[tokens, vocabulary]` for `ids` of shape `[1, tokens]`."""
    arguments = {"input_ids": ids, "use_cache": False}
    with inputs_rounded(original, export.input_scales):
        # Ties were followed when the export was read; here they would overwrite a head that has its own weight.
        output = functional_call(original, export.replaced, (), arguments, tie_weights=False)
    logits: torch.Tensor = output.logits[0]
    return logits


def score_window(log_p: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> WindowScore:
    """Compare an export with the original on one window.

    Args:
        log_p: log-probabilities of the original, `[tokens, vocabulary]`.
        logits: of the export, the same shape.
        ids: the window, `[tokens]`.
    """
    kl_sum = loss_sum = original_loss_sum = 0.0
    num_agreeing = 0
    for start in range(0, len(ids), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        log_p_rows, log_q_rows = log_p[rows], logits[rows].log_softmax(-1)
        kl_sum += float((log_p_rows.exp() * (log_p_rows - log_q_rows)).sum(-1).double().sum())
        num_agreeing += int((log_p_rows.argmax(-1) == log_q_rows.argmax(-1)).sum())
        targets = ids[start + 1 : start + ROWS_AT_ONCE + 1, None]
        for_targets = slice(0, len(targets))  # the last token of the window has none
        loss_sum -= float(log_q_rows[for_targets].gather(-1, targets).double().sum())
        original_loss_sum -= float(log_p_rows[for_targets].gather(-1, targets).double().sum())
    return WindowScore(
        kl_sum=kl_sum,
        num_agreeing=num_agreeing,
        loss_sum=loss_sum,
        original_loss_sum=original_loss_sum,
        num_tokens=len(ids),
    )


def judge_exports(
    model: str | Path, folders: list[Path], windows: list[list[int]]
) -> Iterator[tuple[Path, int, list[WindowScore]]]:
    """Compare exports with their original, window by window.

    Yields:
        each folder with the number of Linears that it quantises and its score of every window, in the given order.
    """
    original = load_float32(model)
    group_size = max(1, int(HELD_EXPORT_BYTES // _linear_bytes(original)))
    for start in range(0, len(folders), group_size):
        group = folders[start : start + group_size]
        exports = [simulate_export(folder, original) for folder in group]
        scores = _judge_group(original, exports, windows)
        yield from zip(group, (len(export.input_scales) for export in exports), scores, strict=True)
        # The next group is read before this name would be bound anew.
        del exports


@torch.no_grad()
def _judge_group(
    original: nn.Module, exports: list[SimulatedExport], windows: list[list[int]]
) -> list[list[WindowScore]]:
    scores: list[list[WindowScore]] = [[] for _ in exports]
    for window in windows:
        ids = torch.tensor([window])
        log_p = original(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        for export, own_scores in zip(exports, scores, strict=True):
            own_scores.append(score_window(log_p, run_simulated(original, export, ids), ids[0]))
    return scores


def _linear_bytes(model: nn.Module) -> int:
    """Bytes of the Linear weights without the output layer: about what an export replaces."""
    head = model.get_output_embeddings()
    return max(1, sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.Linear) and m is not head))
