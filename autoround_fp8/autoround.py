"""`AutoRound`: the Python face, with the argument names that users of AutoRound know."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoround_fp8.config import QuantizeConfig
from autoround_fp8.errors import ConfigError
from autoround_fp8.export import MemorySink
from autoround_fp8.formats.table import default_scheme, get_formats, normalized_formats
from autoround_fp8.model_source import open_model
from autoround_fp8.pipeline import (
    CompressionResult,
    PreparedRun,
    check_output,
    compress,
    export_run,
    keep_harmful_layers,
    prepare,
    write_export,
)
from autoround_fp8.plan import make_plan
from autoround_fp8.schemes import QuantizationScheme, parse_layer_config, parse_scheme


class AutoRound:
    """Quantises a causal language model to W8A8 FP8.

    Args:
        model: Folder, hub id, or a transformers model in memory (left as it is).
        tokenizer: Tokenizer; by default the one in the model's folder.
        scheme: Preset name, dict of fields or `QuantizationScheme`; None = FP8_STATIC, or FP8_STATIC_TENSOR where the
            format has one scale per matrix.
        layer_config: Layer name or pattern -> scheme, preset name or dict; also JSON text or a JSON file's path.
        dataset: Calibration data: `builtin`, a file, a hub name, a combination of them, or Python data.
        iters: Steps of gradient tuning per block, after `algorithm`; 0 = none.
        seqlen: Tokens per calibration sample.
        nsamples: Calibration samples.
        batch_size: Samples per forward.
        device_map: cpu, cuda, a GPU number or auto.
        low_gpu_mem_usage: Accepted; block inputs always live in host memory here.
        seed: Seed of the data order.
        static_kv_dtype: "fp8" = a scale for the keys and one for the values of each block's KV cache, in format
            llm_compressor; None = none.
        ignore_layers: Layers that stay in 16 bit: a comma list or a sequence of names and patterns.
        quant_lm_head: Whether the output layer is FP8 too; not of a model that has it tied to its embedding.
        format: Checkpoint format that `quantize_and_save` and `save_quantized` write by default, or several, comma
            list.
        enable_quanted_input: Whether each block is fed by the quantised blocks before it; None = if `iters` > 0.
        algorithm: How weights are rounded: "gptq" (error compensation), "mse" (scale search), "rtn" (to nearest), or
            "signround" (gradient tuning alone).
        lr: First step of the tuned rounding offsets, in local FP8 steps; None = 1 / (2 iters).
        minmax_lr: First step of the tuned factors on the scales; 0 = the scales stay.
        gradient_accumulate_steps: Batches whose gradients add up before a tuning step.
        not_use_best_mse: Whether the last tuning step is kept, not the one with the least error.
        range_probes: Whether short sequences of special and spread tokens widen the input ranges beside the data.
        act_headroom: Factor on every observed input range.
        moe_input_scale: "shared" = all experts of a layer share one input scale per projection; "per_expert".
        unseen_experts: "max" = an expert without calibration tokens gets the layer's largest input range; "error".
        keep_layers: How many of the most harmful layers stay in 16 bit; what engines fuse counts as one.
        target_kl: KL to the original, on calibration tokens, to be reached with as few bytes in 16 bit as it takes.
        trust_remote_code: Whether code from the model's folder may run.

    Raises:
        ConfigError: On a bad argument. An unknown keyword is a TypeError.
        CheckpointError: If the model cannot be opened.
    """

    _result: tuple[PreparedRun, MemorySink, CompressionResult] | None = None

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        scheme: str | Mapping[str, Any] | QuantizationScheme | None = None,
        layer_config: str | Mapping[str, Any] | None = None,
        dataset: Any = "builtin",
        iters: int = 0,
        seqlen: int = 2048,
        nsamples: int = 128,
        batch_size: int = 8,
        device_map: str | int = "auto",
        low_gpu_mem_usage: bool = False,
        seed: int = 42,
        ignore_layers: str | Sequence[str] = (),
        format: str = "fp8_static",
        enable_quanted_input: bool | None = None,
        algorithm: str = "gptq",
        lr: float | None = None,
        minmax_lr: float = 0.0,
        gradient_accumulate_steps: int = 1,
        not_use_best_mse: bool = False,
        range_probes: bool = True,
        act_headroom: float = 2.0,
        moe_input_scale: str = "shared",
        unseen_experts: str = "max",
        keep_layers: int = 0,
        target_kl: float | None = None,
        static_kv_dtype: str | None = None,
        quant_lm_head: bool = False,
        trust_remote_code: bool = False,
    ):
        self.tokenizer, self._has_own_scheme = tokenizer, scheme is not None
        data: dict[str, Any] = {"dataset": dataset, "nsamples": nsamples, "seqlen": seqlen, "seed": seed}
        self.config = QuantizeConfig(
            scheme=default_scheme(get_formats(format)) if scheme is None else parse_scheme(scheme),
            layer_config=parse_layer_config(layer_config),
            ignore_layers=parse_names(ignore_layers),
            quant_lm_head=quant_lm_head,
            **data,
            iters=iters,
            batch_size=batch_size,
            device=device_map,
            format=normalized_formats(format),
            enable_quanted_input=enable_quanted_input,
            algorithm=algorithm,
            lr=lr,
            minmax_lr=minmax_lr,
            gradient_accumulate_steps=gradient_accumulate_steps,
            not_use_best_mse=not_use_best_mse,
            range_probes=range_probes,
            act_headroom=act_headroom,
            moe_input_scale=moe_input_scale,
            unseen_experts=unseen_experts,
            keep_layers=keep_layers,
            target_kl=target_kl,
            static_kv_dtype=static_kv_dtype,
            trust_remote_code=trust_remote_code,
        )
        self._source = open_model(model, tokenizer, trust_remote_code=trust_remote_code)

    def quantize(self) -> tuple[Any, dict[str, dict[str, Any]]]:
        """Quantises in memory.

        Returns:
            A transformers model whose Linears are `WeightFP8ActFP8StaticQuantLinear`, in the source's dtype on the CPU,
            and the scheme of every linear layer in the blocks, and of an FP8 output layer, by name.
        """
        from autoround_fp8.inference.load import assemble_quantized_model
        from autoround_fp8.models.skeleton import build_skeleton, source_dtype

        run = keep_harmful_layers(prepare(self.config, self._source, self.tokenizer))
        sink = MemorySink()
        self._result = (run, sink, compress(run, sink))
        schemes = {linear.fqn: linear.scheme for linear in run.plan.linears}
        source = self._source
        skeleton = build_skeleton(
            source.config,
            source.tensors.entries,
            source_dtype(dict(source.raw_config)),
            trust_remote_code=self.config.trust_remote_code,
        )
        model = assemble_quantized_model(skeleton, source.tensors, sink.layers, schemes)
        return model, {fqn: scheme.to_dict() for fqn, scheme in schemes.items()}

    def quantize_and_save(
        self,
        output_dir: str | Path,
        format: str | None = None,
        *,
        max_shard_size: str | int = "5GB",
        overwrite: bool = False,
    ) -> tuple[Any, str]:
        """Quantises block by block straight into a folder, then loads it.

        Args:
            output_dir: Target folder.
            format: Checkpoint format, or several, comma list; by default what was given to the constructor.
            max_shard_size: Largest shard.
            overwrite: Whether an earlier export in the folder may be replaced.

        Returns:
            The quantised model, loaded from the folder on the CPU, and the folder; of several formats (each is in a
            folder of its name in `output_dir`) the first.
        """
        from autoround_fp8.inference.load import load_model

        config = self._save_config(format, max_shard_size, overwrite)
        check_output(config, output_dir, self._source)
        summary = export_run(prepare(config, self._source, self.tokenizer), output_dir)
        model = load_model(summary.folder, trust_remote_code=config.trust_remote_code)
        return model, str(summary.folder)

    def save_quantized(
        self,
        output_dir: str | Path,
        format: str | None = None,
        *,
        max_shard_size: str | int = "5GB",
        overwrite: bool = False,
    ) -> str:
        """Writes what `quantize` made; arguments as of `quantize_and_save`. Returns the folder.

        Raises:
            ConfigError: If `quantize` was not called before.
        """
        if self._result is None:
            raise ConfigError(
                "save_quantized needs the result of quantize(); call that first, or use quantize_and_save"
            )
        run, sink, result = self._result
        config = self._save_config(format, max_shard_size, overwrite)
        config = dataclasses.replace(config, ignore_layers=run.config.ignore_layers)  # with those chosen to be kept
        # The layout depends on the shard size, so the plan is made anew; the layers are the ones quantize() made.
        plan = make_plan(config, run.plan.skeleton, self._source.tensors, *get_formats(config.format))
        if {x.fqn: x.scheme for x in plan.quantized} != {x.fqn: x.scheme for x in run.plan.quantized}:
            raise ConfigError(
                f"format {config.format!r} needs other schemes or layers than quantize() made; give it to AutoRound"
            )
        run = dataclasses.replace(run, config=config, plan=plan)

        def fill(writer_sink: Any) -> Any:
            for layer in sink.layers.values():
                writer_sink.put(layer)
            for scales in sink.cache_scales:
                writer_sink.put_cache_scales(scales)
            return list(result.blocks)

        return str(write_export(run, output_dir, fill, time.perf_counter()).folder)

    def _save_config(self, format: str | None, max_shard_size: str | int, overwrite: bool) -> QuantizeConfig:
        names = normalized_formats(format) if format is not None else self.config.format
        # What quantize() made stays as it is; before that, a format may choose.
        is_open = not self._has_own_scheme and self._result is None
        return dataclasses.replace(
            self.config,
            scheme=default_scheme(get_formats(names)) if is_open else self.config.scheme,
            format=names,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
        )


def parse_names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """Layer names from a comma list or a sequence."""
    parts = names.split(",") if isinstance(names, str) else list(names or ())
    return tuple(part.strip() for part in parts if part.strip())
