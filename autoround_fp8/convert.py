"""Writes an FP8 checkpoint again in another format, from its own codes and scales: no data, nothing is rounded anew.

It goes the way of a quantisation run (`plan.py`, `pipeline.py`), with the export in the place of the model.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoround_fp8 import version
from autoround_fp8.checkpoint.locate import locate_checkpoint
from autoround_fp8.checkpoint.reader import DTYPE_NAMES, CheckpointReader, TensorEntry, read_json, tensor_bytes
from autoround_fp8.checkpoint.source_format import is_native_fp8
from autoround_fp8.checkpoint.writer import REPORT_FILE
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import CheckpointError, ConfigError
from autoround_fp8.export import FormatSink, collect_side_files
from autoround_fp8.formats.base import EXPERT_NAME, CheckpointFormat, ParsedQuantization, SchemeTable
from autoround_fp8.formats.kv_cache import (
    CACHE_SCALE,
    cache_scale_names,
    decode_cache_scales,
    is_static_fp8_cache,
)
from autoround_fp8.formats.table import get_formats, normalized_formats, parse_quantization
from autoround_fp8.layer_plan import output_layer
from autoround_fp8.model_card import CARD_FILE, SOURCE_CARD_FILE
from autoround_fp8.model_source import ModelSource
from autoround_fp8.models.skeleton import Skeleton, build_skeleton, load_config, source_dtype
from autoround_fp8.numerics.fp8 import dequantize_fp8
from autoround_fp8.pipeline import REPORT_SCHEMA, ExportSummary, renamed_layers, write_formats
from autoround_fp8.plan import PlannedExport, QuantizationPlan, make_plan
from autoround_fp8.records import CacheScales, QuantizedLinear
from autoround_fp8.schemes import QuantizationScheme

logger = logging.getLogger(__name__)


class ExportedSource:
    """The tensors of an FP8 checkpoint as if it were a 16-bit one: weights dequantised, their scales hidden.

    Args:
        reader: The checkpoint.
        checkpoint_format: Its format.
        parsed: What its config.json says.
        dtype: What weights are dequantised to.

    Raises:
        CheckpointError: If config.json and the tensors do not agree on what is FP8.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        checkpoint_format: CheckpointFormat,
        parsed: ParsedQuantization,
        dtype: torch.dtype,
    ):
        self._reader = reader
        self._format = checkpoint_format
        self._dtype = dtype
        self.kv_cache_scheme = parsed.kv_cache_scheme
        self.schemes: dict[str, QuantizationScheme] = {}
        self._entries: dict[str, TensorEntry] = {}
        for name, entry in reader.entries.items():
            if entry.dtype == "F8_E4M3":
                fqn = name.removesuffix(".weight")
                scheme = parsed.resolve(fqn)
                if not scheme.is_quantized or fqn == name:
                    raise CheckpointError(f"tensor {name!r} is FP8, but config.json says this layer is not quantised")
                self.schemes[fqn] = dataclasses.replace(scheme, data_type="fp", act_data_type="fp")
                entry = dataclasses.replace(entry, dtype=DTYPE_NAMES[dtype], stored_dtype=entry.dtype)
            self._entries[name] = entry
        if self.kv_cache_scheme is not None:
            for name in [name for name in self._entries if CACHE_SCALE.search(name)]:
                del self._entries[name]
        for fqn in self.schemes:
            for part in ("weight_scale", "input_scale"):
                self._entries.pop(f"{fqn}.{part}", None)

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Every tensor but the scales of FP8 weights and of the KV cache, by name."""
        return self._entries

    @property
    def stored_bytes(self) -> int:
        """Size of all tensors as stored, in bytes."""
        return self._reader.stored_bytes

    def layer(self, fqn: str) -> QuantizedLinear:
        """An FP8 layer as it is stored.

        Raises:
            CheckpointError: If a tensor of it is missing or not as config.json says.
        """
        names = (f"{fqn}.{part}" for part in ("weight", "weight_scale", "input_scale"))
        tensors = {name: self._reader.read(name) for name in names if name in self._reader.entries}
        return self._format.decode(fqn, self.schemes[fqn], tensors)

    def cache_scales(self, fqn: str) -> CacheScales:
        """The KV-cache scales of an attention as they are stored.

        Raises:
            CheckpointError: If one is missing or no positive number.
        """
        names = [name for pair in cache_scale_names(fqn).values() for name in pair]
        return decode_cache_scales(fqn, {n: self._reader.read(n) for n in names if n in self._reader.entries})

    def read(self, name: str, index: int | None = None) -> torch.Tensor:
        """A tensor; an FP8 weight dequantised."""
        fqn = name.removesuffix(".weight")
        if fqn not in self.schemes or fqn == name:
            return self._reader.read(name, index)
        layer = self.layer(fqn)
        values = dequantize_fp8(layer.weight, layer.weight_scale).to(self._dtype)
        return values if index is None else values[index]

    def chunks(self, name: str, index: int | None = None) -> Iterator[memoryview]:
        """The bytes of the same; those of a dequantised weight in one piece."""
        if self._entries[name].is_native_fp8:
            yield tensor_bytes(self.read(name, index))
        else:
            yield from self._reader.chunks(name, index)


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion has written.

    Attributes:
        summary: The exports.
        converted_from: Name of the format that was read.
        layers: The FP8 layers that were read.
        dequantized: Format -> those of them that became 16 bit, because its readers need that or it holds no FP8; all
            others have their codes and scales bit for bit.
    """

    summary: ExportSummary
    converted_from: str
    layers: tuple[str, ...]
    dequantized: Mapping[str, tuple[str, ...]]


def convert_checkpoint(
    model: str | Path,
    output_dir: str | Path,
    *,
    format: str,
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> Conversion:
    """Writes an FP8 checkpoint in another format, or several.

    Args:
        model: Folder or hub id of the checkpoint: this package's, Intel's, llm-compressor's or a static `fp8` one.
        output_dir: Target folder.
        format: Checkpoint format, or several, comma list.
        max_shard_size: Largest shard.
        overwrite: Whether an earlier export in the folder may be replaced.
        trust_remote_code: Whether code from the model's folder may run.

    Raises:
        ConfigError: If it is not quantised, or the format cannot hold its schemes: that takes a new quantisation.
        CheckpointError: If the checkpoint is damaged, or is of no format that this package reads.
    """
    formats = get_formats(format)
    folder = locate_checkpoint(model)
    raw_config, model_config = load_config(folder, trust_remote_code=trust_remote_code)
    checkpoint_format, parsed = _parse(str(model), raw_config)
    without = [f.name for f in formats if not f.has_cache_scales]
    if parsed.kv_cache_scheme is not None and without:
        raise ConfigError(
            f"{str(model)!r} has KV-cache scales, which format {without[0]!r} does not hold; llm_compressor does"
        )
    dtype = source_dtype(dict(raw_config))
    tensors = ExportedSource(CheckpointReader(folder), checkpoint_format, parsed, dtype)
    skeleton = build_skeleton(model_config, tensors.entries, dtype, trust_remote_code=trust_remote_code)
    try:
        config = _settings(tensors, normalized_formats(format), max_shard_size, overwrite)
        config = _with_output_layer(config, skeleton, tensors, formats)
        plan = make_plan(config, skeleton, tensors, *formats)
    except ConfigError as e:
        raise ConfigError(f"{str(model)!r} cannot be converted from {checkpoint_format.name} as it is: {e}") from e
    old = _old_report(folder)
    source = ModelSource(
        name=str(old.get("model", model)),
        folder=folder,
        tensors=tensors,
        raw_config=raw_config,
        config=model_config,
        side_files=_side_files(folder, old, trust_remote_code=trust_remote_code),
    )
    schemes = {linear.fqn: linear.scheme for linear in plan.quantized}
    assert all(tensors.schemes[fqn] == scheme for fqn, scheme in schemes.items())

    def fill(sink: FormatSink) -> None:
        for fqn in schemes:
            sink.put(tensors.layer(fqn))
        for fqn in plan.cached_attentions:
            sink.put_cache_scales(tensors.cache_scales(fqn))

    def report(export: PlannedExport, _: None) -> dict[str, Any]:
        return _report(old, source.name, checkpoint_format.name, plan, export)

    summary = write_formats(config, source, plan, output_dir, fill, report)
    return Conversion(
        summary=summary,
        converted_from=checkpoint_format.name,
        layers=tuple(tensors.schemes),
        dequantized={
            export.format.name: tuple(
                fqn for fqn in tensors.schemes if export.quantization_config is None or fqn not in schemes
            )
            for export in plan.exports
        },
    )


def _parse(model: str, raw_config: Mapping[str, Any]) -> tuple[CheckpointFormat, ParsedQuantization]:
    block = raw_config.get("quantization_config")
    if not block:
        raise ConfigError(f"{model!r} is not quantised, so there is nothing to convert: auto-round quantize {model}")
    if is_native_fp8(raw_config):
        raise ConfigError(
            f"{model!r} is native FP8, whose block scales no other format holds; quantise it: auto-round {model}"
        )
    return parse_quantization(block)


def _settings(tensors: ExportedSource, formats: str, max_shard_size: str | int, overwrite: bool) -> QuantizeConfig:
    """Settings under which a plan gives every layer the scheme that it has."""
    schemes, cache = tensors.schemes, tensors.kv_cache_scheme
    if cache is not None and not is_static_fp8_cache(cache):
        raise ConfigError(f"its kv_cache_scheme {dict(cache)} is not one static FP8 scale each for keys and values")
    if not schemes:
        raise CheckpointError("config.json has a quantization_config, but no tensor is FP8")
    dense = {fqn: scheme for fqn, scheme in schemes.items() if not EXPERT_NAME.fullmatch(fqn)}
    experts = {fqn: scheme for fqn, scheme in schemes.items() if fqn not in dense}
    values = list((dense or experts).values())
    names = Counter(str(scheme.to_dict()) for scheme in values)
    default = next(scheme for scheme in values if str(scheme.to_dict()) == names.most_common(1)[0][0])
    # A plan has a default of its own for experts, so all of them are named.
    table = SchemeTable(default=default, schemes=experts, also_kept=(), block_prefixes=())
    others = {fqn: scheme for fqn, scheme in dense.items() if scheme != default}
    return QuantizeConfig(
        scheme=default,
        layer_config={**others, **table.entries(lambda scheme: True)},
        static_kv_dtype=None if cache is None else "fp8",
        format=formats,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
    )


def _with_output_layer(
    config: QuantizeConfig, skeleton: Skeleton, tensors: ExportedSource, formats: Sequence[CheckpointFormat]
) -> QuantizeConfig:
    """The output layer stays FP8 if it is, and all formats have that."""
    name, _ = output_layer(skeleton)
    fqn = skeleton.sources.get(f"{name}.weight", name).removesuffix(".weight")
    is_kept = fqn in tensors.schemes and all(f.has_output_layer for f in formats)
    others = {entry: scheme for entry, scheme in config.layer_config.items() if is_kept or entry != fqn}
    return dataclasses.replace(config, quant_lm_head=is_kept, layer_config=others)


def _old_report(folder: Path) -> dict[str, Any]:
    """The report of the export, if this package made it."""
    if not (folder / REPORT_FILE).is_file():
        return {}
    report = read_json(folder / REPORT_FILE)
    if not isinstance(report, dict) or report.get("schema") != REPORT_SCHEMA:
        logger.warning("%s of the source is not of this version; the new one is made without it", REPORT_FILE)
        return {}
    return report


def _side_files(folder: Path, old: Mapping[str, Any], *, trust_remote_code: bool) -> dict[str, Path | bytes]:
    files = collect_side_files(folder, trust_remote_code=trust_remote_code)
    if CARD_FILE in old.get("files", ()):  # an earlier export's, which the new one replaces
        files.pop(SOURCE_CARD_FILE, None)
        if (folder / SOURCE_CARD_FILE).is_file():
            files[SOURCE_CARD_FILE] = folder / SOURCE_CARD_FILE
    return files


def _report(
    old: Mapping[str, Any], name: str, converted_from: str, plan: QuantizationPlan, export: PlannedExport
) -> dict[str, Any]:
    """The old report, with what is new in it."""
    report: dict[str, Any] = {k: v for k, v in old.items() if k != "files"}
    report |= {
        "schema": REPORT_SCHEMA,
        "version": version.__version__,
        "model": name,
        "format": export.format.name,
        "activations": "not quantised" if export.quantization_config is None else "FP8",
        "converted_from": converted_from,
        "ignored": export.ignored,
    }
    kept = {linear.fqn for linear in plan.quantized}
    if "blocks" in old:
        blocks = [{**b, "layers": [layer for layer in b["layers"] if layer["fqn"] in kept]} for b in old["blocks"]]
        report["blocks"] = [renamed_layers(block, export) for block in blocks]
    if "ranges_on_few_tokens" in old:
        report["ranges_on_few_tokens"] = [export.name_of(name) for name in old["ranges_on_few_tokens"]]
    if "totals" in old:
        report["totals"] = {**old["totals"], "export_bytes": export.layout.num_bytes}
    return report
