"""Codes and scales of the layers of one block, by the chosen algorithm, with an explicit fallback for each.

Read `compressor.py` for where the weights, the input ranges and the second moments come from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from autoround_fp8.config import SignRoundSettings
from autoround_fp8.errors import NumericsError
from autoround_fp8.layer_plan import LinearPlan
from autoround_fp8.nn.observers import InputRange
from autoround_fp8.nn.second_moments import SecondMoments
from autoround_fp8.nn.shared_inputs import InputSamples, SharedInputs
from autoround_fp8.numerics.fp8 import FP8_DTYPE, amax_to_scale, quantize_fp8, strip_rows, weight_sqnr_db
from autoround_fp8.numerics.granularity import PER_TENSOR
from autoround_fp8.records import CacheReport, CacheScales, LayerReport, QuantizedLinear, TuningReport
from autoround_fp8.tuning.cache_scales import make_cache_scales
from autoround_fp8.tuning.error_compensation import CompensationFactor, compensate, factorise
from autoround_fp8.tuning.input_ranges import DYNAMIC, input_amax
from autoround_fp8.tuning.rtn import absmax_scale
from autoround_fp8.tuning.scale_search import search_input_scale, search_scale
from autoround_fp8.tuning.signround import RunBlock, TunableLayer, tune_block

logger = logging.getLogger(__name__)

# Calibration tokens per input feature that go into a second moment, if there are as many. With 4, KL on Gemma3-270M was
# 13 % higher on news than with all of 32 x 512 tokens.
_TOKENS_PER_FEATURE = 32
# Tokens by which an input scale is chosen, spread over the calibration data.
_SAMPLED_TOKENS = 1024
# Of experts' inputs, which several experts share a scale for, fewer: a token goes to some of them.
_EXPERT_FACTOR = 8
# Second moments of experts may take this much, or half of the block in 16 bit.
_FREE_EXPERT_BYTES = 128 << 20

# Layer -> its input scale, None if that is made on the fly, and where it comes from.
InputScales = dict[str, tuple[torch.Tensor | None, str]]


@dataclass(frozen=True, kw_only=True)
class BlockStatistics:
    """What calibration has seen of a block's layers.

    Attributes:
        ranges: Module -> input range.
        inputs: Which layers were given the same; the rest goes by the names of their owners.
        moments: Second moments of the inputs, where the algorithm needs them.
        samples: Some tokens of the inputs, if it looks at them.
    """

    ranges: Mapping[str, InputRange]
    inputs: SharedInputs = field(default_factory=SharedInputs)
    moments: SecondMoments = field(default_factory=lambda: SecondMoments({}))
    samples: InputSamples = field(default_factory=lambda: InputSamples({}))


class BlockQuantizer:
    """Quantises the layers of a block.

    Args:
        algorithm: "rtn": scale from the largest weight, nearest codes; "mse": scale of least squared error; "gptq": the
            same, weighted by the inputs, and error compensation; "mse" takes over for a layer that saw too few tokens.
        act_headroom: Factor on every input range: what the range of an input may grow by before it saturates.
        unseen_experts: "max" or "error", see `QuantizeConfig`.
        tuning: How to tune what `algorithm` made by gradients; None = not at all.
    """

    def __init__(
        self,
        algorithm: str = "rtn",
        *,
        act_headroom: float = 1.0,
        unseen_experts: str = "max",
        tuning: SignRoundSettings | None = None,
    ):
        self._algorithm = algorithm
        self._tuning = tuning
        self._act_headroom = act_headroom
        self._unseen_experts = unseen_experts

    @property
    def is_tuning(self) -> bool:
        """Whether `tune` is to follow `quantize`."""
        return self._tuning is not None

    def statistics(
        self, linears: Sequence[LinearPlan], num_tokens: int, ranges: Mapping[str, InputRange]
    ) -> BlockStatistics:
        """What is to be collected of a block's inputs, still empty.

        Args:
            linears: The layers.
            num_tokens: Calibration tokens that will come.
            ranges: Where the input ranges will be.
        """
        if self._algorithm == "rtn":
            return BlockStatistics(ranges=ranges)
        moments = SecondMoments(self._moment_strides(linears, num_tokens) if self._algorithm == "gptq" else {})
        stride = max(1, num_tokens // _SAMPLED_TOKENS)
        samples = InputSamples(
            {linear.module: stride * (_EXPERT_FACTOR if linear.experts else 1) for linear in linears}
        )
        return BlockStatistics(
            ranges=ranges, inputs=SharedInputs(moments.add, samples.add), moments=moments, samples=samples
        )

    def _moment_strides(self, linears: Sequence[LinearPlan], num_tokens: int) -> dict[str, int]:
        """Modules whose inputs' second moments are summed -> how many tokens count for one.

        Experts see few tokens and count them all, if the moments of all experts together are small enough.
        """
        features = {linear.module: linear.shape[1] for linear in linears}
        expert_modules = {linear.module for linear in linears if linear.experts}
        needed = sum(4 * features[name] ** 2 for name in expert_modules)
        weights = sum(2 * linear.shape[0] * linear.shape[1] for linear in linears)
        if needed > max(weights // 2, _FREE_EXPERT_BYTES):
            logger.info("second moments of %d experts' inputs would take %d MB: mse", len(expert_modules), needed >> 20)
            features = {name: size for name, size in features.items() if name not in expert_modules}
        return {
            name: 1 if name in expert_modules else max(1, num_tokens // (_TOKENS_PER_FEATURE * size))
            for name, size in features.items()
        }

    def check_experts(self, linears: Sequence[LinearPlan], ranges: Mapping[str, InputRange]) -> dict[str, list[int]]:
        """Tokens that each expert of the block saw; experts without any are reported, or refused if so asked.

        Raises:
            NumericsError: If an expert saw none and that is to stop the run.
        """
        counts: dict[str, list[int]] = {}
        for linear in linears:
            if linear.experts and linear.experts not in counts:
                tokens = [ranges.get(name, InputRange()).num_tokens for name in linear.siblings]
                counts[linear.experts] = tokens
                unseen = [expert for expert, count in enumerate(tokens) if count == 0]
                if unseen and len(unseen) < len(tokens):
                    text = f"{linear.experts}: {len(unseen)} of {len(tokens)} experts saw no calibration token"
                    if self._unseen_experts == "error":
                        raise NumericsError(f"{text}, first expert {unseen[0]}; use more or other data")
                    logger.warning("%s; they get the largest input range of the layer's other experts", text)
        return counts

    def input_scales(
        self, linears: Sequence[LinearPlan], modules: Mapping[str, torch.nn.Module], statistics: BlockStatistics
    ) -> InputScales:
        """The layers' input scales, one for all layers of a group, after which the samples are gone; see `quantize`.

        Raises:
            NumericsError: If no token reached a layer.
        """
        weights = _weights(linears, modules)
        found: InputScales = {}
        searched: dict[tuple[str, ...], torch.Tensor] = {}
        for linear in linears:
            if linear.scheme.act_dynamic:
                found[linear.fqn] = None, DYNAMIC
                continue
            amax, source = input_amax(linear.fqn, linear.module, linear.group, linear.siblings, statistics.ranges)
            if linear.group not in searched:
                smallest = amax_to_scale(torch.tensor([amax * self._act_headroom]))
                members = [other for other in linears if other.module in linear.group]
                searched[linear.group] = _searched_input_scale(smallest, members, weights, statistics)
            found[linear.fqn] = searched[linear.group], source
        statistics.samples.clear()
        return found

    def quantize(
        self,
        linears: Sequence[LinearPlan],
        modules: Mapping[str, torch.nn.Module],
        statistics: BlockStatistics,
        input_scales: InputScales,
    ) -> Iterator[tuple[QuantizedLinear, LayerReport]]:
        """Yields each layer with its report; layers that share an input come one after the other.

        Args:
            linears: The layers.
            modules: Module name -> Linear with its weight.
            statistics: What calibration saw.
            input_scales: What `input_scales` made of it.
        """
        weights = _weights(linears, modules)
        for group in _by_input(linears, statistics.inputs):
            moment = statistics.moments.get(statistics.inputs.owner(group[0].module))
            factor = factorise(moment.matrix()) if moment is not None and moment.is_full_rank else None
            algorithm = "gptq" if factor is not None else "rtn" if self._algorithm == "rtn" else "mse"
            column_weights = None if moment is None else moment.column_weights()
            scales = [self._scale(linear, weights, algorithm, column_weights) for linear in group]
            own = [weights[linear.fqn] for linear in group]
            if factor is None:
                codes = [_codes(weight, scale) for weight, scale in zip(own, scales, strict=True)]
            else:
                rows = [weight.shape[0] for weight in own]
                by_row = [scale.reshape(-1, 1).expand(n, 1) for scale, n in zip(scales, rows, strict=True)]
                joined = own[0] if len(own) == 1 else torch.cat(own)
                codes = list(_codes(joined, torch.cat(by_row), factor).split(rows))
            for linear, weight, code, scale in zip(group, own, codes, scales, strict=True):
                bias = modules[linear.module].bias
                input_scale, source = input_scales[linear.fqn]
                layer = QuantizedLinear(
                    fqn=linear.fqn,
                    weight=code.cpu(),
                    weight_scale=scale.cpu(),
                    input_scale=input_scale,
                    bias=bias.detach().cpu() if isinstance(bias, torch.Tensor) else None,
                )
                seen = statistics.ranges.get(linear.module, InputRange())
                yield (
                    layer,
                    LayerReport(
                        fqn=linear.fqn,
                        shape=linear.shape,
                        weight_sqnr_db=weight_sqnr_db(weight, code, scale),
                        input_amax=seen.amax,
                        input_scale=None if input_scale is None else float(input_scale),
                        num_tokens=seen.num_tokens,
                        num_peak_tokens=seen.num_peak_tokens,
                        source=source,
                        algorithm=algorithm,
                    ),
                )

    def cache_scales(self, fqn: str, key: InputRange, value: InputRange) -> tuple[CacheScales, CacheReport]:
        """The scales of an attention's KV cache, with the same room as input scales."""
        return make_cache_scales(fqn, key, value, self._act_headroom)

    def tune(
        self,
        linears: Sequence[LinearPlan],
        modules: Mapping[str, torch.nn.Module],
        quantized: Sequence[tuple[QuantizedLinear, LayerReport]],
        run_block: RunBlock,
        references: Sequence[torch.Tensor],
    ) -> tuple[list[tuple[QuantizedLinear, LayerReport]], TuningReport | None]:
        """Tunes a block's layers by gradients, from what `quantize` made of them.

        Args:
            linears: The layers.
            modules: Module name -> Linear with its weight.
            quantized: All that `quantize` yielded.
            run_block: Runs the block on a batch, see `tune_block`.
            references: Per batch, the output that the block should have.
        """
        if self._tuning is None or not linears:
            return list(quantized), None
        starts = {layer.fqn: (layer, report) for layer, report in quantized}
        weights = _weights(linears, modules)
        tunable = [
            TunableLayer(
                start=starts[linear.fqn][0],
                weight=weights[linear.fqn],
                module=linear.module,
                scale_group=linear.fused[0] if linear.fused and linear.scheme.group_size == PER_TENSOR else linear.fqn,
                input_group=linear.group[0],
                headroom=self._act_headroom,
            )
            for linear in linears
        ]
        layers, report = tune_block(tunable, run_block, references, self._tuning)
        if report.best_step == 0:
            return list(quantized), report
        return [(layer, _tuned_report(starts[layer.fqn][1], weights[layer.fqn], layer)) for layer in layers], report

    def _scale(
        self,
        linear: LinearPlan,
        weights: Mapping[str, torch.Tensor],
        algorithm: str,
        column_weights: torch.Tensor | None,
    ) -> torch.Tensor:
        weight, fused = weights[linear.fqn], [weights[name] for name in linear.fused]
        if algorithm == "rtn":
            return absmax_scale(weight, linear.scheme, fused)
        return search_scale(weight, linear.scheme, column_weights, fused)


def _weights(linears: Sequence[LinearPlan], modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {linear.fqn: _weight_of(linear, modules[linear.module]) for linear in linears}


def _weight_of(linear: LinearPlan, module: torch.nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach() if linear.rows is None else weight.detach()[slice(*linear.rows)]


def _codes(weight: torch.Tensor, scale: torch.Tensor, factor: CompensationFactor | None = None) -> torch.Tensor:
    """FP8 codes of a weight, nearest or with error compensation, in strips of rows."""
    codes = torch.empty(weight.shape, dtype=FP8_DTYPE, device=weight.device)
    length = strip_rows(weight)
    scales = scale.reshape(-1, 1).expand(len(weight), 1)
    for rows, own, part in zip(*(tensor.split(length) for tensor in (weight, scales, codes)), strict=True):
        part.copy_(quantize_fp8(rows, own) if factor is None else compensate(rows, own, factor))
    return codes


def _tuned_report(report: LayerReport, weight: torch.Tensor, layer: QuantizedLinear) -> LayerReport:
    return replace(
        report,
        weight_sqnr_db=weight_sqnr_db(weight.cpu(), layer.weight, layer.weight_scale),
        input_scale=None if layer.input_scale is None else float(layer.input_scale),
        algorithm=f"{report.algorithm}+signround",
    )


def _searched_input_scale(
    smallest: torch.Tensor,
    members: Sequence[LinearPlan],
    weights: Mapping[str, torch.Tensor],
    statistics: BlockStatistics,
) -> torch.Tensor:
    """The input scale of a group, `smallest` if there are no samples."""
    samples: dict[str, torch.Tensor] = {}
    costs: dict[str, torch.Tensor] = {}
    for linear in members:
        owner = statistics.inputs.owner(linear.module)
        rows = samples[owner] if owner in samples else statistics.samples.get(owner)
        if rows is not None:
            cost = torch.linalg.vector_norm(weights[linear.fqn], dim=0, dtype=torch.float32).square_()
            samples[owner], costs[owner] = rows, costs[owner] + cost if owner in costs else cost
    return search_input_scale(smallest, [(samples[name], costs[name]) for name in samples]) if samples else smallest


def _by_input(linears: Sequence[LinearPlan], inputs: SharedInputs) -> list[list[LinearPlan]]:
    groups: dict[str, list[LinearPlan]] = {}
    for linear in linears:
        # An expert's gate and up are one module, and without moments each layer stands alone.
        groups.setdefault(inputs.owner(linear.module), []).append(linear)
    return list(groups.values())
