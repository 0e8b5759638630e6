"""Devices and memory: which device a user's word means, what it can do, how much is used.

The only place that asks torch about CUDA or the CPU's abilities.
"""

from __future__ import annotations

import ctypes
import resource
import sys

import torch

from autoround_fp8.errors import ConfigError


def resolve_device(device: str | int | torch.device | None) -> torch.device:
    """The torch device for a user's word: `cpu`, `cuda`, `cuda:1`, `0`, or `auto` (the first GPU, else the CPU).

    Raises:
        ConfigError: If the word is no device, names several, or asks for a GPU that is not there.
    """
    if isinstance(device, torch.device):
        word = str(device)
    else:
        word = "auto" if device is None else str(device).strip().lower()
    if word == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if "," in word:
        raise ConfigError(f"device {word!r} names several devices; this command runs on one: choose the first of them")
    if word.isdigit():
        word = f"cuda:{word}"
    try:
        resolved = torch.device(word)
    except RuntimeError as e:
        raise ConfigError(f"device {device!r} is unknown; use cpu, cuda, a GPU number or auto") from e
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} is not supported; use cpu, cuda, a GPU number or auto")
    if resolved.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (resolved.index or 0) >= count:
            raise ConfigError(f"device {device!r} is not available: {count} CUDA devices here; use --device cpu")
    return resolved


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 matrix products run natively; else a CPU emulates them, 8 to 10 times slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def reuse_freed_memory() -> None:
    """Lets glibc serve a run's large tensors from memory it already has, instead of fresh pages for every operation.

    `release_memory` still gives it back. For whole processes of ours only: it changes the allocator of the process.
    """
    if sys.platform != "linux":
        return
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    libc = ctypes.CDLL("libc.so.6")
    for parameter in (mmap_threshold, trim_threshold):
        libc.mallopt(parameter, 1 << 30)


def release_memory() -> None:
    """Gives freed memory back to the system: CUDA's cache and glibc's free lists."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        # glibc keeps freed blocks, so without this the process only ever grows.
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def peak_memory_bytes() -> int:
    """Peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; torch's on the CPU has no class of its own."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)
