"""One quantisation from settings to result: opens the source, plans, gets the data, runs the compressor, exports.

`autoround.py` and the CLI are two faces of the functions here.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from autoround_fp8 import version
from autoround_fp8.block_quantizer import BlockQuantizer
from autoround_fp8.calibration.dataset import CalibrationData, load_calibration_data, make_batches
from autoround_fp8.calibration.probes import make_probes
from autoround_fp8.checkpoint.locate import check_output_location
from autoround_fp8.checkpoint.writer import CheckpointWriter, check_target
from autoround_fp8.compressor import BlockwiseCompressor, CompressionResult, LinearSink, mean_sqnr_db
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.device import has_fast_bfloat16, is_out_of_memory, peak_memory_bytes, resolve_device
from autoround_fp8.errors import ConfigError, cause_line
from autoround_fp8.export import (
    QUANT_CONFIG_FILE,
    FormatSink,
    exported_config,
    quantization_config_file,
)
from autoround_fp8.formats.table import get_formats
from autoround_fp8.mixed_precision import check_keep_layers, choose_kept_layers
from autoround_fp8.model_card import CARD_FILE, SOURCE_CARD_FILE, model_card
from autoround_fp8.model_source import ModelSource, load_tokenizer
from autoround_fp8.models.skeleton import Skeleton, build_skeleton, source_dtype
from autoround_fp8.plan import PlannedExport, QuantizationPlan, calibration_dtype, make_plan, report_fp8_share
from autoround_fp8.records import BlockReport
from autoround_fp8.tuning.input_ranges import OBSERVED

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

REPORT_SCHEMA = 1
# A range that fewer tokens than this come near may well be exceeded by the next ones.
_FEW_PEAK_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Everything a run needs, checked: nothing but reading weights and computing is left.

    `probes`: token batches `[sequences, tokens]` that count for input ranges only. `mixed_precision`: what the report
    says of layers that were chosen to stay in 16 bit, if any were to be.
    """

    config: QuantizeConfig
    source: ModelSource
    plan: QuantizationPlan
    data: CalibrationData
    probes: tuple[torch.Tensor, ...]
    device: torch.device
    dtype: torch.dtype
    mixed_precision: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ExportSummary:
    """What a finished export looks like.

    Attributes:
        folder: Where it is; of several formats, the first one's.
        report: Contents of its quantization_report.json.
        folders: Format -> where it is.
    """

    folder: Path
    report: Mapping[str, Any]
    folders: Mapping[str, Path]


def prepare(config: QuantizeConfig, source: ModelSource, tokenizer: Any = None) -> PreparedRun:
    """Checks everything that can be checked without weights: plan, format, device, data.

    Raises:
        AutoRoundError: With one sentence on what is wrong; nothing was written.
    """
    formats = get_formats(config.format)
    device = resolve_device(config.device)
    dtype = calibration_dtype(config, source_dtype(dict(source.raw_config)), has_fast_bfloat16(device))
    skeleton = build_skeleton(source.config, source.tensors.entries, dtype, trust_remote_code=config.trust_remote_code)
    plan = make_plan(config, skeleton, source.tensors, *formats)
    check_keep_layers(config.keep_layers, plan)
    report_fp8_share(plan)
    _check_tuning(config, plan)
    data = CalibrationData(samples=(), sources=(), sha256="")
    probes: tuple[torch.Tensor, ...] = ()
    if plan.needs_calibration or config.measures_harm:
        if tokenizer is None:
            tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
        data = _load_data(config, skeleton, tokenizer)
    if plan.needs_calibration:
        probes = _probes(config, skeleton, tokenizer)
    else:
        _report_without_data(config)
    logger.info(
        "%s: %d layers in %d blocks to FP8, %d kept in 16 bit; %d samples, %d tokens, and %d probe tokens; "
        "%s forward on %s",
        source.name,
        len(plan.quantized),
        len(plan.blocks),
        len(plan.linears) - len(plan.quantized),
        len(data.samples),
        data.num_tokens,
        _num_tokens(probes),
        str(dtype).removeprefix("torch."),
        device,
    )
    return PreparedRun(config=config, source=source, plan=plan, data=data, probes=probes, device=device, dtype=dtype)


def keep_harmful_layers(run: PreparedRun) -> PreparedRun:
    """The run with the layers that `keep_layers` or `target_kl` ask for among the ignored ones; measures which.

    Raises:
        AutoRoundError: With one sentence on what is wrong.
    """
    config = run.config
    if not config.measures_harm:
        return run
    started = time.perf_counter()
    result = choose_kept_layers(config, run.plan, run.source.tensors, run.data.samples, run.device)
    config = dataclasses.replace(config, ignore_layers=(*config.ignore_layers, *result.names))
    plan = make_plan(config, run.plan.skeleton, run.source.tensors, *get_formats(config.format))
    bytes_added = plan.layout.num_bytes - run.plan.layout.num_bytes
    logger.info(
        "kept in 16 bit after %.1f s: %s; KL %.6f -> %.6f on %d calibration tokens, %+.1f MB",
        time.perf_counter() - started,
        ", ".join(result.names) or "nothing",
        result.kl_before,
        result.kl_after,
        result.num_tokens,
        bytes_added / 1e6,
    )
    return dataclasses.replace(run, config=config, plan=plan, mixed_precision=result.to_report(bytes_added))


def _check_tuning(config: QuantizeConfig, plan: QuantizationPlan) -> None:
    dynamic = next((linear.fqn for linear in plan.quantized if linear.scheme.act_dynamic), None)
    if config.iters > 0 and dynamic is not None:
        raise ConfigError(
            f"iters ({config.iters}) must be 0 where inputs are dynamic, as those of {dynamic!r} are: gradient tuning "
            "needs stored input scales; choose a static scheme or --iters 0"
        )


def _load_data(config: QuantizeConfig, skeleton: Skeleton, tokenizer: Any) -> CalibrationData:
    return load_calibration_data(
        config.dataset,
        tokenizer,
        nsamples=config.nsamples,
        seqlen=config.seqlen,
        seed=config.seed,
        max_positions=skeleton.max_positions,
        vocab_size=skeleton.vocab_size,
    )


def _probes(config: QuantizeConfig, skeleton: Skeleton, tokenizer: Any) -> tuple[torch.Tensor, ...]:
    if not config.range_probes:
        return ()
    return make_probes(
        tokenizer,
        vocab_size=skeleton.vocab_size,
        seed=config.seed,
        max_positions=skeleton.max_positions,
        padding_id=skeleton.padding_id,
    )


def _report_without_data(config: QuantizeConfig) -> None:
    """Says what has no effect, as all inputs get their scales on the fly."""
    if config.measures_harm:
        logger.info("dynamic inputs need no calibration data: it only tells which layers do the most harm")
    elif not isinstance(config.dataset, str) or config.dataset != QuantizeConfig().dataset:
        logger.warning("dataset has no effect: dynamic inputs need no calibration data, so none is read")
    if config.algorithm not in ("rtn", "mse"):
        logger.info("algorithm mse, not %s, which needs calibration data: dynamic inputs need none", config.algorithm)


def compress(
    run: PreparedRun, sink: LinearSink, on_block: Callable[[BlockReport], None] = lambda report: None
) -> CompressionResult:
    """Runs the compressor over a prepared run; each quantised layer goes to `sink`.

    Raises:
        AutoRoundError: With one sentence on what is wrong, a lack of memory among it.
    """
    compressor = BlockwiseCompressor(
        run.plan,
        run.source.tensors,
        make_batches(run.data.samples, run.config.batch_size) if run.plan.needs_calibration else (),
        device=run.device,
        quantized_inputs=run.config.quantized_inputs,
        quantizer=BlockQuantizer(
            "rtn" if run.config.algorithm == "signround" else run.config.algorithm,
            act_headroom=run.config.act_headroom,
            unseen_experts=run.config.unseen_experts,
            tuning=run.config.tuning,
        ),
        probes=run.probes,
    )
    try:
        result = compressor.run(sink, on_block)
    except (RuntimeError, MemoryError) as e:
        if not is_out_of_memory(e):
            raise
        raise ConfigError(
            f"out of memory on {run.device} with batch_size {run.config.batch_size} and seqlen {run.config.seqlen}; "
            f"make them smaller ({cause_line(e)})"
        ) from e
    if few := ranges_on_few_tokens(result.blocks):
        logger.info(
            "%d ranges of inputs or caches hang on fewer than %d tokens: %s%s; more or other data may exceed them",
            *(len(few), _FEW_PEAK_TOKENS, ", ".join(few[:3]), ", ..." if len(few) > 3 else ""),
        )
    return result


def ranges_on_few_tokens(blocks: Sequence[BlockReport]) -> list[str]:
    """Layers that decide an input scale by few tokens, and such scales of KV caches, those with the fewest first."""
    found = [(x.num_peak_tokens, x.fqn) for block in blocks for x in block.layers if x.source == OBSERVED]
    for cache in (block.cache for block in blocks if block.cache is not None):
        found += [(cache.k_peak_tokens, f"{cache.fqn}.k_scale"), (cache.v_peak_tokens, f"{cache.fqn}.v_scale")]
    return [name for count, name in sorted(found, key=lambda item: item[0]) if count < _FEW_PEAK_TOKENS]


def check_output(config: QuantizeConfig, output_dir: str | Path, source: ModelSource) -> dict[str, Path]:
    """Checks early that an output folder may be written to; `CheckpointWriter` checks again with all file names.

    Returns:
        Format -> its folder: `output_dir` itself, or `output_dir/FORMAT` for each of several formats.
    """
    target = Path(output_dir).expanduser()
    names = [f.name for f in get_formats(config.format)]
    folders = {name: target if len(names) == 1 else target / name for name in names}
    for folder in folders.values():
        check_output_location(folder, source.folder)
        check_target(folder, {*source.side_files, CARD_FILE}, overwrite=config.overwrite)
    return folders


def export_run(
    run: PreparedRun, output_dir: str | Path, on_block: Callable[[BlockReport], None] = lambda report: None
) -> ExportSummary:
    """Quantises and writes the checkpoint, or one per format; each appears only when all are complete.

    Raises:
        AutoRoundError: With one sentence on what is wrong; nothing is left behind, nothing of the user's is touched.
    """
    started = time.perf_counter()
    check_output(run.config, output_dir, run.source)
    run = keep_harmful_layers(run)

    def fill(sink: FormatSink) -> list[BlockReport]:
        return list(compress(run, sink, on_block).blocks)

    return write_export(run, output_dir, fill, started)


def write_export(
    run: PreparedRun, output_dir: str | Path, fill: Callable[[FormatSink], list[BlockReport]], started: float
) -> ExportSummary:
    """Writes an export whose quantised layers `fill` puts into the sink it is given."""

    def report(export: PlannedExport, blocks: list[BlockReport]) -> dict[str, Any]:
        return make_report(run, export, blocks, time.perf_counter() - started)

    return write_formats(run.config, run.source, run.plan, output_dir, fill, report)


def write_formats(
    config: QuantizeConfig,
    source: ModelSource,
    plan: QuantizationPlan,
    output_dir: str | Path,
    fill: Callable[[FormatSink], _T],
    report: Callable[[PlannedExport, _T], dict[str, Any]],
) -> ExportSummary:
    """Writes a plan's exports; each appears only when all are complete.

    Args:
        config: Format, target and shard settings.
        source: What is copied from, tensors and side files.
        plan: What is written.
        output_dir: Target folder.
        fill: Puts every quantised layer into the sink it is given.
        report: Makes an export's report of what `fill` returned.
    """
    folders = check_output(config, output_dir, source)
    writers: list[tuple[CheckpointWriter, PlannedExport]] = []
    reports: list[dict[str, Any]] = []
    try:
        for export in plan.exports:
            twin = next((writer for writer, other in writers if other.layout == export.layout), None)
            side_files = _side_files(source, export)
            folder = folders[export.format.name]
            writer = CheckpointWriter(folder, export.layout, side_files, overwrite=config.overwrite, twin=twin)
            writers.append((writer, export))
        own = [(writer, export) for writer, export in writers if not writer.is_twin]
        made = fill(FormatSink(*own))
        for writer, _ in own:
            writer.copy_rest(source.tensors)
        card = _text_of(source.side_files.get(SOURCE_CARD_FILE))
        for writer, export in writers:
            reports.append(report(export, made))
            written = exported_config(source.raw_config, export.quantization_config)
            writer.finish(written, reports[-1], {CARD_FILE: model_card(reports[-1], card).encode()})
    except BaseException:
        for writer, _ in reversed(writers):  # the first one may have made the folder of all
            writer.abort()
        raise
    return ExportSummary(folder=next(iter(folders.values())), report=reports[0], folders=folders)


def _side_files(source: ModelSource, export: PlannedExport) -> dict[str, Path | bytes | None]:
    side_files: dict[str, Path | bytes | None] = {**source.side_files, CARD_FILE: None}
    if export.format.writes_config_file and export.quantization_config is not None:
        side_files[QUANT_CONFIG_FILE] = quantization_config_file(export.quantization_config)
    return side_files


def _text_of(content: Path | bytes | None) -> str | None:
    data = content.read_bytes() if isinstance(content, Path) else content
    return None if data is None else data.decode(errors="replace")


def make_report(run: PreparedRun, export: PlannedExport, blocks: list[BlockReport], seconds: float) -> dict[str, Any]:
    """The contents of quantization_report.json: settings, data, every layer, totals. JSON values only."""
    report = {
        "schema": REPORT_SCHEMA,
        "version": version.__version__,
        "model": run.source.name,
        "format": export.format.name,
        "activations": "not quantised" if export.quantization_config is None else "FP8",
        "settings": run.config.to_report(),
        "calibration": {
            "sources": list(run.data.sources),
            "samples": len(run.data.samples),
            "tokens": run.data.num_tokens,
            "probe_tokens": _num_tokens(run.probes),
            "sha256": run.data.sha256,
            "dtype": str(run.dtype).removeprefix("torch."),
        },
        "blocks": [renamed_layers(asdict(block), export) for block in blocks],
        "ranges_on_few_tokens": [export.name_of(name) for name in ranges_on_few_tokens(blocks)],
        "ignored": export.ignored,
        "totals": {
            "mean_weight_sqnr_db": mean_sqnr_db(blocks),
            "source_bytes": run.source.tensors.stored_bytes,
            "export_bytes": export.layout.num_bytes,
            "seconds": seconds,
            "peak_memory_bytes": peak_memory_bytes(),
        },
    }
    if run.mixed_precision is not None:
        report["mixed_precision"] = run.mixed_precision
    return report


def renamed_layers(block: Mapping[str, Any], export: PlannedExport) -> dict[str, Any]:
    """A block of a report with its layers' names those of the export."""
    return {**block, "layers": [{**layer, "fqn": export.name_of(layer["fqn"])} for layer in block["layers"]]}


def _num_tokens(batches: Sequence[torch.Tensor]) -> int:
    return sum(batch.numel() for batch in batches)
