"""`auto-round [quantize]`: options of a quantisation run, and its progress on the screen."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autoround_fp8.errors import ConfigError

if TYPE_CHECKING:
    from autoround_fp8.config import QuantizeConfig
    from autoround_fp8.evaluation.tasks import ResolvedTasks
    from autoround_fp8.records import BlockReport

logger = logging.getLogger(__name__)

# AutoRound options that mean nothing here: refused with a reason, never ignored.
REFUSED_OPTIONS = {
    "--enable_torch_compile": "tuning runs without torch.compile in this version",
}

_SCHEME_FIELDS = ("bits", "group_size", "data_type", "act_bits", "act_group_size", "act_data_type")


def add_quantize_parser(subparsers: Any) -> None:
    """Adds the `quantize` command."""
    parser = subparsers.add_parser(
        "quantize", help="quantise a model (the default command)", description="Quantise a model to W8A8 FP8."
    )
    parser.add_argument("model_word", nargs="?", metavar="MODEL", help="model folder or hub id")
    group = parser.add_argument_group("model")
    group.add_argument("--model", "--model_name", "--model_name_or_path", help="the same, as an option")
    group.add_argument("--device", "--device_map", "--devices", default="auto", help="cpu, cuda, 0, auto (default)")
    group.add_argument(
        "--trust_remote_code", action="store_true", help="run code from the model's folder (default: no)"
    )
    group = parser.add_argument_group("calibration")
    group.add_argument("--dataset", default="builtin", help="builtin, a file, a hub name, or several with options")
    group.add_argument("--seqlen", "--seq_len", type=int, default=2048, help="tokens per sample (2048)")
    group.add_argument("--nsamples", "--nsample", type=int, default=128, help="samples (128)")
    group.add_argument("--batch_size", "--train_bs", "--bs", type=int, default=8, help="samples per forward (8)")
    group.add_argument("--seed", type=int, default=42, help="seed of the data order (42)")
    group.add_argument("--calibration_dtype", default="auto", help="dtype of the calibration forward (auto)")
    group.add_argument("--low_gpu_mem_usage", action="store_true", help="always so: block inputs live in host memory")
    group = parser.add_argument_group("output")
    group.add_argument("--output_dir", help="target folder (required)")
    group.add_argument(
        "--format",
        "--formats",
        default="fp8_static",
        help="fp8_static (default), llm_compressor, fp8, fake; or several",
    )
    group.add_argument("--max_shard_size", default="5GB", help="largest shard (5GB)")
    group.add_argument(
        "--overwrite", action="store_true", help="replace an earlier export of this program in the target"
    )
    group = parser.add_argument_group("scheme")
    group.add_argument("--scheme", help="FP8_STATIC (default), FP8_STATIC_TENSOR (format fp8) or FP8_DYNAMIC")
    for name in _SCHEME_FIELDS:
        group.add_argument(f"--{name}", type=int if name.endswith(("bits", "size")) else str, help=argparse.SUPPRESS)
    group.add_argument("--disable_act_dynamic", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--layer_config", help="JSON text or file: layer name or pattern -> scheme")
    group.add_argument("--ignore_layers", "--fp_layers", default="", help="layers that stay in 16 bit, comma list")
    group.add_argument("--quant_lm_head", action="store_true", help="the output layer too (not in format fp8)")
    group.add_argument("--static_kv_dtype", help="fp8: scales of an FP8 KV cache too (format llm_compressor)")
    _add_tuning_options(parser)
    group = parser.add_argument_group("evaluation after quantising")
    group.add_argument("--tasks", "--task", default="", help="lm-eval tasks, comma list")
    group.add_argument("--include_path", help="folder with further task files")
    group.add_argument("--eval_bs", type=int, default=8, help="batch size (8)")
    group.add_argument("--limit", type=float, help="documents per task")
    group.add_argument("--num_fewshot", type=int, help="examples in the prompt")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and details")
    for option, reason in REFUSED_OPTIONS.items():
        parser.add_argument(option, action=_Refuse, reason=reason, help=argparse.SUPPRESS)


def _add_tuning_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tuning")
    group.add_argument(
        "--iters", "--iter", type=int, default=0, help="steps of gradient tuning per block, after --algorithm (0)"
    )
    group.add_argument("--algorithm", default="gptq", help="gptq (default), mse, rtn, signround (needs --iters)")
    group.add_argument("--lr", type=float, help="first step of the rounding offsets, in FP8 steps (1 / (2 iters))")
    group.add_argument("--minmax_lr", type=float, default=0.0, help="first step of the factors on scales (0)")
    group.add_argument("--gradient_accumulate_steps", type=int, default=1, help="batches per tuning step (1)")
    group.add_argument("--not_use_best_mse", action="store_true", help="keep the last tuning step, not the best")
    group.add_argument("--act_headroom", type=float, default=2.0, help="factor on every input range (2)")
    group.add_argument(
        "--disable_range_probes", action="store_true", help="input ranges from the samples alone, without probe tokens"
    )
    group.add_argument("--moe_input_scale", default="shared", help="one for a layer's experts (shared), or per_expert")
    group.add_argument("--unseen_experts", default="max", help="experts without tokens: the layer's max, or error")
    group.add_argument("--keep_layers", type=int, default=0, help="keep the N most harmful layers in 16 bit (0)")
    group.add_argument("--target_kl", type=float, help="keep as few in 16 bit as this KL takes, nats per token")
    switch = group.add_mutually_exclusive_group()
    switch.add_argument(
        "--enable_quanted_input",
        action="store_const",
        const=True,
        help="feed each block by the quantised blocks before it (default with --iters)",
    )
    switch.add_argument(
        "--disable_quanted_input",
        action="store_const",
        const=False,
        dest="enable_quanted_input",
        help="feed it by the original ones (default without)",
    )


class _Refuse(argparse.Action):
    def __init__(self, *, reason: str, **kwargs: Any):
        super().__init__(nargs="?", **kwargs)
        self._reason = reason

    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parser.error(f"{self.option_strings[0]} does not apply: {self._reason}")


def config_from_args(args: argparse.Namespace) -> QuantizeConfig:
    """The settings that the options stand for.

    Raises:
        ConfigError: On a value that is not supported.
    """
    from autoround_fp8.autoround import parse_names
    from autoround_fp8.config import QuantizeConfig
    from autoround_fp8.formats.table import default_scheme, get_formats, normalized_formats
    from autoround_fp8.schemes import parse_layer_config, parse_scheme

    scheme = default_scheme(get_formats(args.format)) if args.scheme is None else parse_scheme(args.scheme)
    for name in _SCHEME_FIELDS:
        if getattr(args, name) is not None:
            scheme[name] = getattr(args, name)
    if args.disable_act_dynamic and scheme.act_dynamic:
        raise ConfigError(f"--disable_act_dynamic contradicts --scheme {args.scheme}, whose inputs are dynamic")
    return QuantizeConfig(
        scheme=parse_scheme(scheme),
        layer_config=parse_layer_config(args.layer_config),
        ignore_layers=parse_names(args.ignore_layers),
        quant_lm_head=args.quant_lm_head,
        dataset=args.dataset,
        nsamples=args.nsamples,
        seqlen=args.seqlen,
        batch_size=args.batch_size,
        seed=args.seed,
        iters=args.iters,
        lr=args.lr,
        minmax_lr=args.minmax_lr,
        gradient_accumulate_steps=args.gradient_accumulate_steps,
        not_use_best_mse=args.not_use_best_mse,
        algorithm=args.algorithm,
        enable_quanted_input=args.enable_quanted_input,
        range_probes=not args.disable_range_probes,
        act_headroom=args.act_headroom,
        moe_input_scale=args.moe_input_scale,
        unseen_experts=args.unseen_experts,
        keep_layers=args.keep_layers,
        target_kl=args.target_kl,
        static_kv_dtype=args.static_kv_dtype,
        device=args.device,
        calibration_dtype=args.calibration_dtype,
        format=normalized_formats(args.format),
        max_shard_size=args.max_shard_size,
        overwrite=args.overwrite,
        trust_remote_code=args.trust_remote_code,
    )


def run_quantize(args: argparse.Namespace) -> int:
    """Quantises and, if asked, evaluates. Returns the exit code."""
    if args.model and args.model_word and args.model != args.model_word:
        raise ConfigError(f"two models are given: {args.model_word!r} and --model {args.model!r}")
    model = args.model or args.model_word
    if not model:
        raise ConfigError("no model is given: auto-round MODEL --output_dir OUT")
    if not args.output_dir:
        raise ConfigError("no target is given: add --output_dir OUT")
    with _imports_uncollected():
        from autoround_fp8.device import resolve_device, reuse_freed_memory
        from autoround_fp8.model_source import open_model
        from autoround_fp8.pipeline import check_output, export_run, prepare

        config = config_from_args(args)
        resolve_device(config.device)
        reuse_freed_memory()
        tasks = _resolve_tasks(args)
        source = open_model(model, trust_remote_code=config.trust_remote_code)
        check_output(config, args.output_dir, source)
        run = prepare(config, source)
    show = progress(len(run.plan.blocks) + (run.plan.output_layer is not None))
    summary = export_run(run, args.output_dir, show)
    totals = summary.report["totals"]
    print(
        f"{', '.join(str(folder) for folder in summary.folders.values())}: {totals['source_bytes'] / 1e6:.1f} MB -> "
        f"{totals['export_bytes'] / 1e6:.1f} MB in {totals['seconds']:.1f} s, mean weight SQNR "
        f"{totals['mean_weight_sqnr_db']:.1f} dB, peak memory {totals['peak_memory_bytes'] / 1e6:.0f} MB"
    )
    if tasks is not None:
        from autoround_fp8.cli.evaluate import evaluate_folder

        evaluate_folder(summary.folder, tasks, args)
    return 0


@contextmanager
def _imports_uncollected() -> Iterator[None]:
    """No garbage collection while a million objects are imported, and none of them again, the one at exit included."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _resolve_tasks(args: argparse.Namespace) -> ResolvedTasks | None:
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    if not names:
        return None
    from autoround_fp8.evaluation.tasks import resolve_tasks

    return resolve_tasks(names, args.include_path)


def progress(num_blocks: int) -> Callable[[BlockReport], None]:
    """A callback that shows each finished block: a bar on a terminal, one line per block elsewhere."""
    started = time.perf_counter()
    bar = None
    if sys.stderr.isatty():
        from tqdm import tqdm

        bar = tqdm(total=num_blocks, unit="block", dynamic_ncols=True)
    done = 0

    def show(report: BlockReport) -> None:
        nonlocal done
        done += 1
        worst = min(report.layers, key=lambda layer: layer.weight_sqnr_db, default=None)
        note = (
            f"worst {worst.fqn.removeprefix(report.fqn + '.')} {worst.weight_sqnr_db:.1f} dB"
            if worst
            else "nothing to do"
        )
        memory = f"{report.peak_memory_bytes / 1e6:.0f} MB"
        if bar is not None:
            bar.set_postfix_str(f"{memory}, {note}")
            bar.update()
            if done == num_blocks:
                bar.close()
        else:
            if report.tuning is not None:
                first, best = report.tuning.losses[0], report.tuning.losses[report.tuning.best_step]
                note += f", tuning {first:.2e} -> {best:.2e} at step {report.tuning.best_step}"
            left = (time.perf_counter() - started) / done * (num_blocks - done)
            logger.info(
                "%d/%d %s %.1f s, %s, %s, %.0f s left", done, num_blocks, report.fqn, report.seconds, memory, note, left
            )

    return show
