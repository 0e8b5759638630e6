"""The README.md of an export: what it was made of and how, what was measured, and how to run it.

Written from the report alone, so that the same run gives the same text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from autoround_fp8.numerics.granularity import PER_CHANNEL

CARD_FILE = "README.md"
SOURCE_CARD_FILE = "README.source.md"

# Format -> how its readers are started; DIR is the export.
_USES: dict[str, tuple[str, ...]] = {
    "fp8_static": ("auto-round eval DIR --tasks piqa",),
    "llm_compressor": ("vllm serve DIR", "python -m sglang.launch_server --model-path DIR"),
    "fp8": ("vllm serve DIR", "python -m sglang.launch_server --model-path DIR"),
    "fake": ("vllm serve DIR",),
}
_READERS: dict[str, str] = {
    "fp8_static": "Intel's AutoRound and autoround_fp8 load it; vLLM does not: convert it to llm_compressor for that.",
    "llm_compressor": "vLLM, SGLang, transformers with compressed-tensors (dense models) and autoround_fp8 load it.",
    "fp8": "vLLM, SGLang and autoround_fp8 load it.",
    "fake": "A 16-bit model like any other, with weights rounded as FP8; its inputs are not quantised.",
}
_LICENCE_KEYS = ("license:", "license_name:", "license_link:")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*/[\w.\-]+")
_SHOWN_LAYERS = 8


def model_card(report: Mapping[str, Any], source_card: str | None = None) -> str:
    """The text of README.md.

    Args:
        report: Contents of quantization_report.json, of which only `model`, `version` and `format` must be there.
        source_card: The README.md of the original, whose licence is named; None = it has none.
    """
    name = str(report["model"])
    # A folder of the one who made it says nothing to others.
    shown = name if _HUB_ID.fullmatch(name) else name.rstrip("/").rpartition("/")[2]
    made = "Quantised" if "settings" in report else "Converted"
    lines = [*_front_matter(name, source_card), f"# {shown.rpartition('/')[2]} in FP8", ""]
    lines += [
        f"{made} from `{shown}` by autoround_fp8 {report['version']}, format `{report['format']}`. "
        f"{_READERS[report['format']]}",
        "",
        "| what | how |",
        "|---|---|",
        *(f"| {what} | {how} |" for what, how in _rows(report)),
        "",
        "`quantization_report.json` has the numbers of every layer.",
        "",
        "```bash",
        *_USES[report["format"]],
        "```",
    ]
    if source_card is not None:
        lines += ["", f"The card of the original is [{SOURCE_CARD_FILE}]({SOURCE_CARD_FILE})."]
    return "\n".join(lines) + "\n"


def _front_matter(name: str, source_card: str | None) -> list[str]:
    """The metadata that the hub reads: the licence as the original names it, and the original if it is on the hub."""
    match = re.match(r"---\r?\n(.*?)\r?\n---", source_card or "", re.DOTALL)
    kept = [line for line in (match[1].splitlines() if match else ()) if line.startswith(_LICENCE_KEYS)]
    if _HUB_ID.fullmatch(name):
        kept.append(f"base_model: {name}")
    return ["---", *kept, "---", ""] if kept else []


def _rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    settings, totals = report.get("settings"), report.get("totals")
    if settings is not None:
        scheme = settings["scheme"]
        per = "output channel" if scheme["group_size"] == PER_CHANNEL else "matrix"
        yield "weights", f"FP8 E4M3, one scale per {per}"
        if report["activations"] == "FP8":
            dynamic = "one scale per token, made on the fly"
            yield "inputs", "FP8 E4M3, " + (dynamic if scheme["act_dynamic"] else "one calibrated scale per layer")
        tuned = f", then {settings['iters']} steps of gradient tuning" if settings["iters"] else ""
        yield "algorithm", f"{settings['algorithm']}{tuned}"
    calibration = report.get("calibration")
    if calibration is not None and calibration["samples"]:
        yield "calibration", "; ".join(calibration["sources"])
    blocks = report.get("blocks", ())
    layers = [layer for block in blocks for layer in block["layers"]]
    if layers:
        yield "layers in FP8", str(len(layers))
    caches = sum(block.get("cache") is not None for block in blocks)
    if caches:
        yield "KV cache", f"calibrated FP8 E4M3 scales, one for keys and one for values, in {caches} blocks"
    kept = report.get("ignored")
    if kept:
        more = f" and {len(kept) - _SHOWN_LAYERS} more" if len(kept) > _SHOWN_LAYERS else ""
        yield "kept in 16 bit in the blocks", ", ".join(f"`{fqn}`" for fqn in kept[:_SHOWN_LAYERS]) + more
    if totals is not None:
        yield "size", f"{totals['source_bytes'] / 1e6:.1f} MB -> {totals['export_bytes'] / 1e6:.1f} MB"
        if math.isfinite(totals["mean_weight_sqnr_db"]) and layers:
            worst = min(layers, key=lambda layer: layer["weight_sqnr_db"])
            low = f"{worst['weight_sqnr_db']:.1f} dB in `{worst['fqn']}`"
            yield "weights, signal to noise", f"{totals['mean_weight_sqnr_db']:.1f} dB in the mean, {low}"
    if "mixed_precision" in report:
        mixed = report["mixed_precision"]
        after = f"{mixed['kl_after']:.4f} with {len(mixed['kept'])} in 16 bit"
        yield "KL on calibration tokens", f"{mixed['kl_before']:.4f} with all layers in FP8, {after}"
    if "converted_from" in report:
        yield "converted", f"from format `{report['converted_from']}`, without new calibration"
