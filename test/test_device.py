"""Words for devices, and what this machine says about itself. Fault K5."""

import subprocess
import sys

import pytest
import torch

from autoround_fp8.device import has_fast_bfloat16, is_out_of_memory, peak_memory_bytes, release_memory, resolve_device
from autoround_fp8.errors import ConfigError

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@pytest.mark.parametrize("word", ["cpu", " CPU ", torch.device("cpu")])
def test_cpu_by_any_spelling(word: str | torch.device) -> None:
    assert resolve_device(word) == torch.device("cpu")


def test_cpu_with_an_index() -> None:
    assert resolve_device("cpu:0").type == "cpu"


@without_gpu
@pytest.mark.parametrize("word", ["auto", None])
def test_auto_is_the_cpu_without_a_gpu(word: str | None) -> None:
    assert resolve_device(word).type == "cpu"


@without_gpu
@pytest.mark.parametrize("word", ["cuda", "cuda:1", "0", 0])
def test_a_missing_gpu_is_named_with_a_way_out(word: str | int) -> None:
    with pytest.raises(ConfigError, match="0 CUDA devices here; use --device cpu"):
        resolve_device(word)


@pytest.mark.parametrize("word", ["bogus", "", "-1", "mps", "meta", "0,1", "cuda:0,1"])
def test_other_words_are_refused_by_name(word: str) -> None:
    with pytest.raises(ConfigError, match=repr(word)):
        resolve_device(word)


def test_fast_bfloat16_is_an_answer_for_the_cpu() -> None:
    assert has_fast_bfloat16(torch.device("cpu")) in (True, False)


def test_a_lack_of_memory_is_known_on_every_device() -> None:
    lacks = [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("[..] DefaultCPUAllocator: not")]
    assert [is_out_of_memory(error) for error in (*lacks, RuntimeError("size mismatch"), ValueError())] == [
        *[True] * 3,
        *[False] * 2,
    ]


def test_memory_is_counted_in_bytes_and_release_is_harmless() -> None:
    release_memory()
    assert peak_memory_bytes() > 50 * 2**20  # an interpreter with torch holds more than that


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_reused_memory_needs_few_fresh_pages() -> None:
    script = """
import resource, torch
from autoround_fp8.device import reuse_freed_memory
if {reuse}:
    reuse_freed_memory()
torch.set_num_threads(1)
for _ in range(20):
    torch.ones(16 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
    fresh, reused = (
        int(subprocess.run([sys.executable, "-c", script.format(reuse=reuse)], capture_output=True, check=True).stdout)
        for reuse in (False, True)
    )
    assert reused < fresh // 2
