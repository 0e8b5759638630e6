"""One quantisation from settings to result: opens the source, plans, gets the data, runs the compressor, exports.

`autoround.py` and the CLI are two faces of the functions here.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autoround_fp8 import version
from autoround_fp8.block_quantizer import BlockQuantizer
from autoround_fp8.calibration.dataset import CalibrationData, load_calibration_data, make_batches
from autoround_fp8.checkpoint.locate import check_output_location, locate_checkpoint
from autoround_fp8.checkpoint.reader import CheckpointReader, InMemorySource, TensorSource
from autoround_fp8.checkpoint.source_format import open_source
from autoround_fp8.checkpoint.writer import CheckpointWriter, check_target
from autoround_fp8.compressor import BlockwiseCompressor, CompressionResult, LinearSink, mean_sqnr_db
from autoround_fp8.config import QuantizeConfig
from autoround_fp8.device import has_fast_bfloat16, peak_memory_bytes, resolve_device
from autoround_fp8.errors import ConfigError
from autoround_fp8.export import (
    QUANT_CONFIG_FILE,
    FormatSink,
    collect_side_files,
    exported_config,
    quantization_config_file,
)
from autoround_fp8.formats.table import get_formats
from autoround_fp8.inference.linear import WeightFP8ActFP8StaticQuantLinear
from autoround_fp8.models.linear_experts import LinearExperts
from autoround_fp8.models.loaded_model import loaded_tensors
from autoround_fp8.models.skeleton import (
    Skeleton,
    build_model,
    build_skeleton,
    decoded,
    load_config,
    source_dtype,
)
from autoround_fp8.plan import PlannedExport, QuantizationPlan, calibration_dtype, make_plan
from autoround_fp8.records import BlockReport

logger = logging.getLogger(__name__)

REPORT_SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model to quantise, wherever it comes from.

    Attributes:
        name: What the user called it.
        folder: Its folder, or None for a model in memory.
        tensors: Its weights.
        raw_config: Its config.json.
        config: Its transformers config, without quantization_config.
        side_files: Files to copy into the export.
    """

    name: str
    folder: Path | None
    tensors: TensorSource
    raw_config: Mapping[str, Any]
    config: Any
    side_files: Mapping[str, Path | bytes]


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """Everything a run needs, checked: nothing but reading weights and computing is left."""

    config: QuantizeConfig
    source: ModelSource
    plan: QuantizationPlan
    data: CalibrationData
    device: torch.device
    dtype: torch.dtype


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


def open_model(model: Any, tokenizer: Any = None, *, trust_remote_code: bool = False) -> ModelSource:
    """Opens a model by path, hub id, or as an object in memory.

    Args:
        model: Folder, hub id, or a transformers model with its weights in memory.
        tokenizer: Tokenizer to save beside a model in memory.
        trust_remote_code: Whether code from the model's folder may run.

    Raises:
        CheckpointError: If the checkpoint is missing or damaged.
        ConfigError: If `model` is neither a path nor a model, or a model that this package made.
    """
    if isinstance(model, (str, Path)):
        folder = locate_checkpoint(model)
        raw_config, config = load_config(folder, trust_remote_code=trust_remote_code)
        return ModelSource(
            name=str(model),
            folder=folder,
            tensors=open_source(CheckpointReader(folder), raw_config, source_dtype(raw_config)),
            raw_config=raw_config,
            config=config,
            side_files=collect_side_files(folder, trust_remote_code=trust_remote_code),
        )
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise ConfigError(f"model must be a folder, a hub id or a transformers model, got {type(model).__name__}")
    return _open_in_memory(model, tokenizer)


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a model's folder, or None if there is none.

    Raises:
        ConfigError: If there is one and it cannot be loaded.
    """
    if source.folder is None:
        return None
    names = {path.name for path in source.folder.iterdir()}
    if not names & {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model"}:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError, TypeError, ImportError) as e:
        raise ConfigError(f"the tokenizer of {source.name!r} cannot be loaded: {e}") from e


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
    if plan.needs_calibration:
        data = _load_data(config, source, skeleton, tokenizer)
    else:
        data = CalibrationData(samples=(), sources=(), sha256="")
        _report_without_data(config)
    logger.info(
        "%s: %d layers in %d blocks to FP8, %d kept in 16 bit; %d samples, %d tokens; %s forward on %s",
        source.name,
        len(plan.quantized),
        len(plan.blocks),
        sum(len(b) for b in plan.blocks) - len(plan.quantized),
        len(data.samples),
        data.num_tokens,
        str(dtype).removeprefix("torch."),
        device,
    )
    return PreparedRun(config=config, source=source, plan=plan, data=data, device=device, dtype=dtype)


def _load_data(config: QuantizeConfig, source: ModelSource, skeleton: Skeleton, tokenizer: Any) -> CalibrationData:
    if tokenizer is None:
        tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
    return load_calibration_data(
        config.dataset,
        tokenizer,
        nsamples=config.nsamples,
        seqlen=config.seqlen,
        seed=config.seed,
        max_positions=skeleton.max_positions,
        vocab_size=skeleton.vocab_size,
    )


def _report_without_data(config: QuantizeConfig) -> None:
    """Says what has no effect, as all inputs get their scales on the fly."""
    if not isinstance(config.dataset, str) or config.dataset != QuantizeConfig().dataset:
        logger.warning("dataset has no effect: dynamic inputs need no calibration data, so none is read")
    if config.algorithm not in ("rtn", "mse"):
        logger.info("algorithm mse, not %s, which needs calibration data: dynamic inputs need none", config.algorithm)


def compress(
    run: PreparedRun, sink: LinearSink, on_block: Callable[[BlockReport], None] = lambda report: None
) -> CompressionResult:
    """Runs the compressor over a prepared run; each quantised layer goes to `sink`."""
    compressor = BlockwiseCompressor(
        run.plan,
        run.source.tensors,
        make_batches(run.data.samples, run.config.batch_size),
        device=run.device,
        quantized_inputs=run.config.enable_quanted_input,
        quantizer=BlockQuantizer(
            run.config.algorithm,
            act_headroom=run.config.act_headroom,
            unseen_experts=run.config.unseen_experts,
        ),
    )
    return compressor.run(sink, on_block)


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
        check_target(folder, set(source.side_files), overwrite=config.overwrite)
    return folders


def export_run(
    run: PreparedRun, output_dir: str | Path, on_block: Callable[[BlockReport], None] = lambda report: None
) -> ExportSummary:
    """Quantises and writes the checkpoint, or one per format; each appears only when all are complete.

    Raises:
        AutoRoundError: With one sentence on what is wrong; nothing is left behind, nothing of the user's is touched.
    """
    started = time.perf_counter()

    def fill(sink: FormatSink) -> list[BlockReport]:
        return list(compress(run, sink, on_block).blocks)

    return write_export(run, output_dir, fill, started)


def write_export(
    run: PreparedRun, output_dir: str | Path, fill: Callable[[FormatSink], list[BlockReport]], started: float
) -> ExportSummary:
    """Writes an export whose quantised layers `fill` puts into the sink it is given."""
    folders = check_output(run.config, output_dir, run.source)
    writers: list[tuple[CheckpointWriter, PlannedExport]] = []
    reports: list[dict[str, Any]] = []
    try:
        for export in run.plan.exports:
            twin = next((writer for writer, other in writers if other.layout == export.layout), None)
            writers.append((_open_writer(run, export, folders[export.format.name], twin), export))
        own = [(writer, export) for writer, export in writers if not writer.is_twin]
        blocks = fill(FormatSink(*((writer, export.format) for writer, export in own)))
        for writer, _ in own:
            writer.copy_rest(run.source.tensors)
        seconds = time.perf_counter() - started
        for writer, export in writers:
            reports.append(make_report(run, export, blocks, seconds))
            writer.finish(exported_config(run.source.raw_config, export.quantization_config), reports[-1])
    except BaseException:
        for writer, _ in reversed(writers):  # the first one may have made the folder of all
            writer.abort()
        raise
    return ExportSummary(folder=next(iter(folders.values())), report=reports[0], folders=folders)


def _open_writer(
    run: PreparedRun, export: PlannedExport, folder: Path, twin: CheckpointWriter | None
) -> CheckpointWriter:
    side_files = dict(run.source.side_files)
    if export.format.writes_config_file and export.quantization_config is not None:
        side_files[QUANT_CONFIG_FILE] = quantization_config_file(export.quantization_config)
    return CheckpointWriter(folder, export.layout, side_files, overwrite=run.config.overwrite, twin=twin)


def make_report(run: PreparedRun, export: PlannedExport, blocks: list[BlockReport], seconds: float) -> dict[str, Any]:
    """The contents of quantization_report.json: settings, data, every layer, totals. JSON values only."""
    return {
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
            "sha256": run.data.sha256,
            "dtype": str(run.dtype).removeprefix("torch."),
        },
        "blocks": [asdict(block) for block in blocks],
        "ignored": sorted(fqn for fqn, scheme in run.plan.exceptions.items() if not scheme.is_quantized),
        "totals": {
            "mean_weight_sqnr_db": mean_sqnr_db(blocks),
            "source_bytes": run.source.tensors.stored_bytes,
            "export_bytes": export.layout.num_bytes,
            "seconds": seconds,
            "peak_memory_bytes": peak_memory_bytes(),
        },
    }


def _open_in_memory(model: Any, tokenizer: Any) -> ModelSource:
    import json

    for name, module in model.named_modules():
        if isinstance(module, LinearExperts | WeightFP8ActFP8StaticQuantLinear):
            raise ConfigError(
                f"the model was loaded or quantised by autoround_fp8 ({name!r} is a {type(module).__name__}) and "
                "cannot be quantised again; give the original model or its folder"
            )
    raw_config = json.loads(model.config.to_json_string(use_diff=True))
    raw_config["architectures"] = [type(model).__name__]
    raw_config["dtype"] = str(model.dtype).removeprefix("torch.")
    config = type(model.config).from_dict({k: decoded(v) for k, v in raw_config.items() if k != "quantization_config"})
    tensors = loaded_tensors(model, build_model(config, model.dtype))
    files: dict[str, Path | bytes] = {}
    if getattr(model, "generation_config", None) is not None:
        # Written as it is: saving through transformers refuses settings that the model's authors shipped.
        files["generation_config.json"] = (model.generation_config.to_json_string() + "\n").encode()
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            files.update({path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()})
    else:
        logger.info("no tokenizer was given with the model in memory, so none is exported")
    return ModelSource(
        name=getattr(model, "name_or_path", "") or type(model).__name__,
        folder=None,
        tensors=open_source(InMemorySource(tensors), raw_config, source_dtype(raw_config)),
        raw_config=raw_config,
        config=config,
        side_files=files,
    )
