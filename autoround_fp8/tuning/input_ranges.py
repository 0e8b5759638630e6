"""Which input range a layer gets: its own, its group's, or, for an expert that no token reached, the other experts'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoround_fp8.errors import NumericsError
from autoround_fp8.nn.observers import InputRange

OBSERVED = "observed"
DYNAMIC = "made on the fly"
GROUP = "fused group"
SHARED = "shared by experts"
UNSEEN = "unseen expert: largest of the layer"


def input_amax(
    fqn: str,
    module: str,
    group: Sequence[str],
    siblings: Sequence[str],
    ranges: Mapping[str, InputRange],
    headroom: float = 1.0,
) -> tuple[float, str]:
    """The largest absolute input that a layer's scale has to hold, and where it comes from.

    See `InputRange.widened` for what `headroom` does.

    Args:
        fqn: The layer's name, for messages.
        module: The module that was observed for it.
        group: Modules that share one input scale, itself included.
        siblings: For an expert, the modules that do the same in all experts of the layer; else empty.
        ranges: Module -> what it has seen.
        headroom: Factor, at least 1.

    Raises:
        NumericsError: If no token reached the layer, and for an expert none reached any other either.
    """
    seen = ranges.get(module, InputRange())
    if seen.num_tokens == 0 and not any(ranges[name].num_tokens for name in siblings if name in ranges):
        what = "any expert of the layer of" if siblings else "layer"
        raise NumericsError(f"no calibration token reached {what} {fqn!r}, so its input range is unknown")
    names = siblings if seen.num_tokens == 0 else group
    amax = max(ranges.get(name, InputRange()).widened(headroom) for name in names)
    if seen.num_tokens == 0:
        return amax, UNSEEN
    if amax == seen.widened(headroom):
        return amax, OBSERVED
    return amax, SHARED if siblings else GROUP
