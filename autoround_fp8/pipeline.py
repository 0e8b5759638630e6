"""One quantisation from settings to result: opens the source, plans, gets the data, runs the compressor, exports.

`autoround.py` and the CLI are two faces of the functions here.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from autoround_fp8 import version
from autoround_fp8.block_quantizer import BlockQuantizer
from autoround_fp8.calibration.dataset import CalibrationData, load_calibration_data, make_batches
from autoround_fp8.calibration.probes import make_probes
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
from autoround_fp8.formats.table import get_format
from autoround_fp8.inference.linear import WeightFP8ActFP8StaticQuantLinear
from autoround_fp8.mixed_precision import check_keep_layers, choose_kept_layers
from autoround_fp8.models.linear_experts import LinearExperts
from autoround_fp8.models.loaded_model import loaded_tensors
from autoround_fp8.models.skeleton import build_model, build_skeleton, decoded, load_config, source_dtype
from autoround_fp8.plan import QuantizationPlan, calibration_dtype, make_plan
from autoround_fp8.records import BlockReport
from autoround_fp8.tuning.input_ranges import OBSERVED

logger = logging.getLogger(__name__)

REPORT_SCHEMA = 1
# A range that fewer tokens than this come near may well be exceeded by the next ones.
_FEW_PEAK_TOKENS = 4


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
        folder: Where it is.
        report: Contents of its quantization_report.json.
    """

    folder: Path
    report: Mapping[str, Any]


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
    checkpoint_format = get_format(config.format)
    device = resolve_device(config.device)
    dtype = calibration_dtype(config, source_dtype(dict(source.raw_config)), has_fast_bfloat16(device))
    skeleton = build_skeleton(source.config, source.tensors.entries, dtype, trust_remote_code=config.trust_remote_code)
    plan = make_plan(config, skeleton, source.tensors, checkpoint_format)
    check_keep_layers(config.keep_layers, plan)
    if tokenizer is None:
        tokenizer = load_tokenizer(source, trust_remote_code=config.trust_remote_code)
    data = load_calibration_data(
        config.dataset,
        tokenizer,
        nsamples=config.nsamples,
        seqlen=config.seqlen,
        seed=config.seed,
        max_positions=skeleton.max_positions,
        vocab_size=skeleton.vocab_size,
    )
    probes: tuple[torch.Tensor, ...] = ()
    if config.range_probes:
        probes = make_probes(
            tokenizer,
            vocab_size=skeleton.vocab_size,
            seed=config.seed,
            max_positions=skeleton.max_positions,
            padding_id=skeleton.padding_id,
        )
    logger.info(
        "%s: %d layers in %d blocks to FP8, %d kept in 16 bit; %d samples, %d tokens, and %d probe tokens; "
        "%s forward on %s",
        source.name,
        len(plan.quantized),
        len(plan.blocks),
        sum(len(b) for b in plan.blocks) - len(plan.quantized),
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
    if not config.keep_layers and config.target_kl is None:
        return run
    started = time.perf_counter()
    result = choose_kept_layers(config, run.plan, run.source.tensors, run.data.samples, run.device)
    config = dataclasses.replace(config, ignore_layers=(*config.ignore_layers, *result.names))
    plan = make_plan(config, run.plan.skeleton, run.source.tensors, get_format(config.format))
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


def compress(
    run: PreparedRun, sink: LinearSink, on_block: Callable[[BlockReport], None] = lambda report: None
) -> CompressionResult:
    """Runs the compressor over a prepared run; each quantised layer goes to `sink`."""
    compressor = BlockwiseCompressor(
        run.plan,
        run.source.tensors,
        make_batches(run.data.samples, run.config.batch_size),
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
    result = compressor.run(sink, on_block)
    if few := ranges_on_few_tokens(result.blocks):
        logger.info(
            "the input ranges of %d layers hang on fewer than %d tokens: %s%s; more or other data may exceed them",
            *(len(few), _FEW_PEAK_TOKENS, ", ".join(few[:3]), ", ..." if len(few) > 3 else ""),
        )
    return result


def ranges_on_few_tokens(blocks: Sequence[BlockReport]) -> list[str]:
    """Names of the layers that decide an input scale by few tokens, those with the fewest first."""
    layers = [layer for block in blocks for layer in block.layers if layer.source == OBSERVED]
    few = [layer for layer in layers if layer.num_peak_tokens < _FEW_PEAK_TOKENS]
    return [layer.fqn for layer in sorted(few, key=lambda layer: layer.num_peak_tokens)]


def check_output(config: QuantizeConfig, output_dir: str | Path, source: ModelSource) -> Path:
    """Checks early that an output folder may be written to; `CheckpointWriter` checks again with all file names."""
    target = Path(output_dir).expanduser()
    check_output_location(target, source.folder)
    check_target(target, set(source.side_files), overwrite=config.overwrite)
    return target


def export_run(
    run: PreparedRun, output_dir: str | Path, on_block: Callable[[BlockReport], None] = lambda report: None
) -> ExportSummary:
    """Quantises and writes the checkpoint; it appears only when it is complete.

    Raises:
        AutoRoundError: With one sentence on what is wrong; nothing is left behind, nothing of the user's is touched.
    """
    started = time.perf_counter()
    target = check_output(run.config, output_dir, run.source)
    run = keep_harmful_layers(run)

    def fill(sink: FormatSink) -> list[BlockReport]:
        return list(compress(run, sink, on_block).blocks)

    return write_export(run, target, fill, started)


def write_export(
    run: PreparedRun, target: Path, fill: Callable[[FormatSink], list[BlockReport]], started: float
) -> ExportSummary:
    """Writes an export whose quantised layers `fill` puts into the sink it is given."""
    checkpoint_format = get_format(run.config.format)
    config = exported_config(run.source.raw_config, run.plan, checkpoint_format, run.config.scheme)
    side_files = {**run.source.side_files, QUANT_CONFIG_FILE: quantization_config_file(config)}
    writer = CheckpointWriter(target, run.plan.layout, side_files, overwrite=run.config.overwrite)
    try:
        blocks = fill(FormatSink(writer, checkpoint_format))
        writer.copy_rest(run.source.tensors)
        report = make_report(run, blocks, time.perf_counter() - started)
        writer.finish(config, report)
    except BaseException:
        writer.abort()
        raise
    return ExportSummary(folder=target, report=report)


def make_report(run: PreparedRun, blocks: list[BlockReport], seconds: float) -> dict[str, Any]:
    """The contents of quantization_report.json: settings, data, every layer, totals. JSON values only."""
    report = {
        "schema": REPORT_SCHEMA,
        "version": version.__version__,
        "model": run.source.name,
        "settings": run.config.to_report(),
        "calibration": {
            "sources": list(run.data.sources),
            "samples": len(run.data.samples),
            "tokens": run.data.num_tokens,
            "probe_tokens": _num_tokens(run.probes),
            "sha256": run.data.sha256,
            "dtype": str(run.dtype).removeprefix("torch."),
        },
        "blocks": [asdict(block) for block in blocks],
        "ranges_on_few_tokens": ranges_on_few_tokens(blocks),
        "ignored": sorted(fqn for fqn, scheme in run.plan.exceptions.items() if not scheme.is_quantized),
        "totals": {
            "mean_weight_sqnr_db": mean_sqnr_db(blocks),
            "source_bytes": run.source.tensors.stored_bytes,
            "export_bytes": run.plan.layout.num_bytes,
            "seconds": seconds,
            "peak_memory_bytes": peak_memory_bytes(),
        },
    }
    if run.mixed_precision is not None:
        report["mixed_precision"] = run.mixed_precision
    return report


def _num_tokens(batches: Sequence[torch.Tensor]) -> int:
    return sum(batch.numel() for batch in batches)


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
