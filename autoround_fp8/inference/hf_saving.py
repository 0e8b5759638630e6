"""`save_pretrained` of a loaded FP8 model: the checkpoint it came from, tensor for tensor, by transformers' own writer.

transformers asks a model's quantiser what to write; `Fp8Saver` answers with the names, shapes and dtypes of the source.
Read `hf_quantizer.py` for the other direction.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from autoround_fp8.checkpoint.materialize import TensorPart
from autoround_fp8.checkpoint.reader import DTYPES, CheckpointReader
from autoround_fp8.errors import ConfigError
from autoround_fp8.inference.linear import WeightFP8ActFP8StaticQuantLinear
from autoround_fp8.models.patches import refuse_saving
from autoround_fp8.models.skeleton import Skeleton


class CheckpointQuantization(QuantizationConfigMixin):
    """A checkpoint's `quantization_config` as transformers carries it along; written again as it was.

    Args:
        block: What config.json says.
    """

    def __init__(self, block: Mapping[str, Any]):
        self.block = copy.deepcopy(dict(block))
        self.quant_method = self.block["quant_method"]
        self.packing_format = self.block.get("packing_format")

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Takes the block as it is; other arguments are none of its fields."""
        config = cls(config_dict)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """The block, equal to the source's."""
        return copy.deepcopy(self.block)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A parameter, or some of its rows, that a tensor of the checkpoint consists of.

    Attributes:
        parameter: Its name in the model.
        rows: The rows (number of this part, number of parts); (0, 1) = all.
        index: Which entry of the tensor's first dimension it is; None = the tensor itself.
        transposed: Whether it is stored as `[in, out]`.
    """

    parameter: str
    rows: tuple[int, int] = (0, 1)
    index: int | None = None
    transposed: bool = False

    def cut(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The rows, laid out as they are stored."""
        number, count = self.rows
        tensor = state[self.parameter].detach()
        tensor = tensor if count == 1 else tensor.chunk(count, dim=0)[number]
        return tensor.t() if self.transposed else tensor


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of the checkpoint: how it is stored, and what of the model it consists of."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def restored(self, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The tensor as the checkpoint has it.

        Raises:
            ConfigError: If the model no longer holds it, or not in full precision.
        """
        gone = [piece.parameter for piece in self.pieces if piece.parameter not in state]
        if gone:
            raise ConfigError(f"the model cannot be saved: it no longer has {gone[0]!r}, of tensor {self.name!r}")
        parts = [piece.cut(state) for piece in self.pieces]
        held = parts[0] if self.pieces[0].index is None else torch.stack(parts)
        if held.numel() == 1:  # a scale per matrix may be stored once for every channel
            held = held.reshape(()).expand(self.shape)
        if held.numel() != torch.Size(self.shape).numel():
            raise ConfigError(
                f"the model cannot be saved: tensor {self.name!r} has shape {list(self.shape)} in the checkpoint, "
                f"{list(held.shape)} in the model"
            )
        stored = held.to(self.dtype).reshape(self.shape).contiguous()
        if held.dtype != self.dtype:
            self._require_lossless(held, stored)
        return stored

    def _require_lossless(self, held: torch.Tensor, stored: torch.Tensor) -> None:
        # A narrower dtype in the model has lost what the checkpoint had; a wider one may have been written to since.
        narrower = torch.promote_types(held.dtype, self.dtype) != held.dtype
        if narrower or not torch.equal(stored.to(held.dtype).reshape(held.shape), held):
            raise ConfigError(
                f"the model cannot be saved: tensor {self.name!r} is {self.dtype} in the checkpoint, {held.dtype} with "
                "other values in the model; load it in the checkpoint's dtype"
            )


class Fp8Saver(HfQuantizer):
    """What transformers asks when it saves a model: here, the checkpoint's own tensors.

    Args:
        quantization_config: The checkpoint's.
        stored: Its tensors.
    """

    requires_calibration = True

    def __init__(self, quantization_config: Any, stored: Iterable[StoredTensor] = (), **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.stored = tuple(stored)

    def is_serializable(self) -> bool:
        """Always; a model that cannot be saved refuses it itself."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Never: there is no gradient through FP8 codes."""
        return False

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The tensors to write, by their names in the checkpoint.

        Raises:
            ConfigError: As `StoredTensor.restored`.
        """
        state, found, seen = model.state_dict(), {}, set()
        for stored in self.stored:
            tensor = stored.restored(state)
            # transformers drops one of two tensors that share memory, also where the checkpoint has both.
            storage = tensor.untyped_storage().data_ptr()
            found[stored.name] = tensor.clone() if storage in seen else tensor
            seen.add(storage)
        return found, {}


def stored_tensors(skeleton: Skeleton, reader: CheckpointReader) -> tuple[StoredTensor, ...]:
    """Where in a loaded model each tensor of its checkpoint is.

    Args:
        skeleton: The model, filled, with experts as Linears and FP8 linears in place.
        reader: The checkpoint.

    Raises:
        ConfigError: If the model lacks one.
    """
    pieces: dict[str, list[Piece]] = {}
    held = set(skeleton.model.state_dict())
    for name, module in skeleton.model.named_modules():
        if isinstance(module, WeightFP8ActFP8StaticQuantLinear):
            for leaf in {"weight", "weight_scale", "input_scale"} & module._parameters.keys():
                held.discard(f"{name}.{leaf}")
                if module._parameters[leaf] is not None:
                    pieces[f"{module.name}.{leaf}"] = [Piece(parameter=f"{name}.{leaf}")]
    for parameter, recipe in skeleton.recipes().items():
        parts = (TensorPart(name=recipe),) if isinstance(recipe, str) else recipe
        if parameter in held:
            for number, part in enumerate(parts):
                pieces.setdefault(part.name, []).append(
                    Piece(
                        parameter=parameter,
                        rows=(number, len(parts)),
                        index=part.index,
                        transposed=part.transposed,
                    )
                )
    lacking = [name for name in reader.names if name not in pieces]
    if lacking:
        raise ConfigError(
            f"the model has no place for {len(lacking)} tensors of its checkpoint, first {lacking[0]!r}, so they would "
            "be lost"
        )
    return tuple(
        StoredTensor(
            name=name,
            dtype=DTYPES[entry.dtype],
            shape=entry.shape,
            pieces=tuple(sorted(pieces[name], key=lambda piece: piece.index or 0)),
        )
        for name, entry in reader.entries.items()
    )


def make_savable(skeleton: Skeleton, reader: CheckpointReader, saver: Fp8Saver) -> None:
    """Gives a loaded model what `save_pretrained` needs, or has it refused with the reason.

    Args:
        skeleton: The model.
        reader: Its checkpoint.
        saver: Gets to know the tensors and becomes the model's quantiser.
    """
    model = skeleton.model
    try:
        saver.stored = stored_tensors(skeleton, reader)
    except ConfigError as e:
        refuse_saving(model, str(e))
        return
    model.hf_quantizer = saver
    model.config.quantization_config = saver.quantization_config
    # None of transformers' renamings: the names are the checkpoint's already.
    model._weight_conversions = []
