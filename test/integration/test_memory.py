"""Peak memory of a run grows neither with the number of layers nor with the number of tuning steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny_model

SCRIPT = """
import json, sys, torch
torch.set_num_threads(1)
from autoround_fp8.autoround import AutoRound
rows = torch.randint(4, 128, (4, 64), generator=torch.Generator().manual_seed(0))
runner = AutoRound(sys.argv[1], dataset=rows, nsamples=4, seqlen=64, iters=int(sys.argv[3]), device_map="cpu")
from autoround_fp8.pipeline import export_run, prepare
summary = export_run(prepare(runner.config, runner._source), sys.argv[2])
print(json.dumps([block["peak_memory_bytes"] for block in summary.report["blocks"]]))
"""


TUNING = """
import sys, torch
torch.set_num_threads(1)
from autoround_fp8.autoround import AutoRound
from autoround_fp8.device import peak_memory_bytes
rows = torch.randint(4, 128, (8, 128), generator=torch.Generator().manual_seed(0))
settings = {"algorithm": "rtn", "batch_size": 4, "format": "llm_compressor", "static_kv_dtype": "fp8"}
AutoRound(sys.argv[1], dataset=rows, iters=int(sys.argv[2]), device_map="cpu", **settings).quantize()
print(peak_memory_bytes())
"""


def last_line(script: str, *words: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("iters", ["0", "2"])
def test_peak_memory_is_flat_in_depth(tmp_path: Path, iters: str) -> None:
    peaks = {}
    for depth in (6, 12):
        source = save_tiny_model(
            tmp_path / f"source{depth}", "llama", num_hidden_layers=depth, hidden_size=512, intermediate_size=2048
        )
        peaks[depth] = max(json.loads(last_line(SCRIPT, str(source), str(tmp_path / f"out{depth}"), iters)))
    # Six more layers of 17 MB in float32 would add 100 MB to some 400 MB if they stayed.
    assert peaks[12] < 1.1 * peaks[6]


@pytest.mark.slow
def test_peak_memory_is_flat_in_tuning_steps(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "source", "llama")
    few, many = (int(last_line(TUNING, str(source), iters)) for iters in ("5", "100"))
    # A step's graph holds more than 3 MB (512 tokens, some 1,500 values of 4 bytes each): 95 of them would be 280 MB.
    assert many < few + 40 * 2**20
