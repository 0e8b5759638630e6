"""A model on the meta device: every module, no weights, built from config.json alone. No `from_pretrained`.

Finds the decoder blocks. Read `name_map.py` for which tensors its parameters are read from, and
`checkpoint/materialize.py` for how a part of it comes to life.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoround_fp8.checkpoint.materialize import TensorPart
from autoround_fp8.checkpoint.reader import read_json
from autoround_fp8.errors import CheckpointError, ConfigError, UnsupportedModelError, cause_line
from autoround_fp8.models.families import REFUSED
from autoround_fp8.models.linear_experts import find_experts, linearize, linearized
from autoround_fp8.models.name_map import ExpertsSource, map_names

# What transformers raises, somewhere inside, on a config whose values do not make a model.
_CONFIG_FAULTS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    ImportError,
)


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """A model whose weights are (mostly) still on disk.

    Attributes:
        model: The transformers model, in eval mode, parameters on meta.
        config: Its transformers config, without any quantization_config.
        block_names: Module names of the decoder blocks, in order (`model.layers.0` ...).
        sources: Parameter or buffer name in the model -> tensor name in the checkpoint; experts are not among them.
        experts: Name of each module with experts -> where they are in the checkpoint.
        unused: Tensors of the checkpoint that belong to nothing in the model.
    """

    model: Any
    config: Any
    block_names: tuple[str, ...]
    sources: dict[str, str]
    experts: dict[str, ExpertsSource]
    unused: tuple[str, ...]

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder blocks, in order."""
        return [self.model.get_submodule(name) for name in self.block_names]

    @property
    def container_name(self) -> str:
        """Module name of the list that holds the blocks (`model.layers`)."""
        return self.block_names[0].rpartition(".")[0]

    def experts_in(self, module: str) -> dict[str, ExpertsSource]:
        """The experts below a module, "" for the whole model."""
        return {name: e for name, e in self.experts.items() if not module or name.startswith(module + ".")}

    @contextmanager
    def linearized(self, module: str) -> Iterator[dict[str, str | tuple[TensorPart, ...]]]:
        """Makes the experts below a module (a block) one Linear each for the duration of the context.

        Yields:
            Where every parameter of the model, those experts included, is read from.
        """
        with linearized(self.model, {name: source.layout for name, source in self.experts_in(module).items()}):
            yield self.recipes(module)

    def linearize(self) -> None:
        """Makes all experts of the model one Linear each, for good."""
        linearize(self.model, {name: source.layout for name, source in self.experts.items()})

    def recipes(self, module: str = "") -> dict[str, str | tuple[TensorPart, ...]]:
        """Where every parameter is read from, once the experts below a module ("" = all) are Linears."""
        names: dict[str, str | tuple[TensorPart, ...]] = dict(self.sources)
        for source in self.experts_in(module).values():
            names.update(source.recipes())
        return names

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model was made for, in tokens."""
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def padding_id(self) -> int | None:
        """The token id that is nothing but padding; None if the config names none, or one that is BOS or EOS too."""
        config = self.config.get_text_config(decoder=True)
        padding, bos, eos = (getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos"))
        return None if padding in (bos, *(eos if isinstance(eos, list) else [eos])) else padding

    @property
    def vocab_size(self) -> int:
        """Rows of the input embedding."""
        return int(self.model.get_input_embeddings().weight.shape[0])


def load_config(folder: Path, *, trust_remote_code: bool = False) -> tuple[dict[str, Any], Any]:
    """Reads a checkpoint's config.

    Returns:
        The JSON as it is, and the transformers config without its `quantization_config`.

    Raises:
        CheckpointError: If config.json is missing or damaged.
        ConfigError: If the model needs code from its folder and `trust_remote_code` is off.
        UnsupportedModelError: If transformers does not know the model type.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = read_json(folder / "config.json")
    if not isinstance(raw, dict):
        raise CheckpointError(f"{folder / 'config.json'} is not a JSON object")
    model_type: Any = raw.get("model_type")
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if raw.get("auto_map") and not known and not trust_remote_code:
        raise ConfigError(
            f"model {str(folder)!r} (model_type {model_type!r}) brings its own code, which is run only with "
            "--trust_remote_code (off by default, unlike AutoRound's)"
        )
    if not known and not raw.get("auto_map"):
        raise UnsupportedModelError(
            f"model_type {model_type!r} of {str(folder)!r} is not known to the installed transformers"
        )
    if known and model_type in REFUSED:
        raise UnsupportedModelError(f"model_type {model_type!r} is not supported: {REFUSED[model_type]}")
    fields = {key: decoded(value) for key, value in raw.items() if key != "quantization_config"}
    try:
        if known:
            config = CONFIG_MAPPING[model_type].from_dict(fields)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
            if hasattr(config, "quantization_config"):
                del config.quantization_config
        text_config = config.get_text_config(decoder=True)
    except (*_CONFIG_FAULTS, StrictDataclassError) as e:
        raise CheckpointError(f"transformers cannot read {folder / 'config.json'}: {' '.join(str(e).split())}") from e
    if not hasattr(text_config, "model_type"):  # plain JSON, which transformers took as it is
        raise CheckpointError(
            f"{folder / 'config.json'} has a nested config of the text model, which model_type {model_type!r} does not "
            "have"
        )
    return raw, config


def decoded(value: Any) -> Any:
    """Infinity as transformers 5 writes it into JSON, `{"__float__": "Infinity"}`, back as a float."""
    if isinstance(value, dict):
        return float(value["__float__"]) if value.keys() == {"__float__"} else {k: decoded(v) for k, v in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value


def source_dtype(raw_config: dict[str, Any]) -> torch.dtype:
    """The dtype a checkpoint's config names (`dtype`, formerly `torch_dtype`); bfloat16 if none.

    Raises:
        CheckpointError: If it is no dtype that models are run in.
    """
    text = raw_config.get("text_config") or {}
    name = raw_config.get("dtype") or raw_config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    dtype = getattr(torch, str(name or "bfloat16").removeprefix("torch."), None)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise CheckpointError(f"dtype {name!r} in config.json is not bfloat16, float16 or float32")
    return dtype


def build_skeleton(
    config: Any, tensor_names: Iterable[str], dtype: torch.dtype, *, trust_remote_code: bool = False
) -> Skeleton:
    """Builds the model on meta and maps its parameters to the checkpoint's tensors.

    Args:
        config: transformers config without `quantization_config`.
        tensor_names: Tensor names of the checkpoint.
        dtype: dtype the model computes in.

    Raises:
        UnsupportedModelError: If there is no causal LM class, no list of decoder blocks, or a parameter without tensor.
        CheckpointError: If the config's values make no model, or a parameter has no tensor.
    """
    return map_skeleton(build_model(config, dtype, trust_remote_code=trust_remote_code), config, tensor_names)


def map_skeleton(model: Any, config: Any, tensor_names: Iterable[str]) -> Skeleton:
    """Maps the parameters of a model on meta to a checkpoint's tensors.

    Args and errors are those of `build_skeleton`.
    """
    # First, as its refusals say what is odd about a family; its list of blocks may be odd too.
    layouts = find_experts(model)
    names = find_blocks(model, config)
    mapped = map_names(model, tensor_names, layouts)
    return Skeleton(
        model=model,
        config=config,
        block_names=names,
        sources=mapped.sources,
        experts=mapped.experts,
        unused=mapped.unused,
    )


def build_model(config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """The causal language model of a config on meta, in eval mode.

    Raises:
        UnsupportedModelError: If there is none.
        CheckpointError: If transformers cannot build it with the config's values.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    own_code = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not (
        trust_remote_code and AutoModelForCausalLM.__name__ in own_code
    ):
        raise UnsupportedModelError(
            f"there is no causal language model for model_type {config.model_type!r} in the installed transformers"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except _CONFIG_FAULTS as e:
        raise CheckpointError(
            f"transformers cannot build a model of model_type {config.model_type!r} with the values of its config: "
            f"{cause_line(e)}"
        ) from e
    model.eval()
    model.requires_grad_(False)
    return model


def find_blocks(model: Any, config: Any) -> tuple[str, ...]:
    """Module names of the decoder blocks: the one ModuleList of decoder layers with `num_hidden_layers` entries.

    Raises:
        UnsupportedModelError: If none or several lists qualify.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    text_config = config.get_text_config(decoder=True)
    count: Any = getattr(text_config, "num_hidden_layers", None)
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    found = [n for n, m in lists if all(isinstance(layer, GradientCheckpointingLayer) for layer in m)]
    found = found or [
        n for n, m in lists if len({type(layer) for layer in m}) == 1 and "." not in n.partition("layers")[2]
    ]
    if len(found) > 1 and hasattr(model, "get_decoder"):  # a vision tower may have as many layers
        inside = set(model.get_decoder().modules())
        found = [n for n in found if model.get_submodule(n) in inside]
    if len(found) != 1 or not count:
        raise UnsupportedModelError(
            f"cannot tell the decoder blocks of model_type {config.model_type!r}: {len(found)} lists with "
            f"num_hidden_layers ({count}) layers{': ' + ', '.join(found) if found else ''}"
        )
    return tuple(f"{found[0]}.{i}" for i in range(count))


def shares_tied_weight(model: Any, name: str) -> bool:
    """Whether a parameter is tied to another one of the model."""
    keys = model.all_tied_weights_keys
    return name in keys or name in keys.values()
