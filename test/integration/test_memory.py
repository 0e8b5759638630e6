"""Peak memory of a run does not grow with the number of layers."""

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
runner = AutoRound(sys.argv[1], dataset=rows, nsamples=4, seqlen=64, device_map="cpu")
from autoround_fp8.pipeline import export_run, prepare
summary = export_run(prepare(runner.config, runner._source), sys.argv[2])
print(json.dumps([block["peak_memory_bytes"] for block in summary.report["blocks"]]))
"""


@pytest.mark.slow
def test_peak_memory_is_flat_in_depth(tmp_path: Path) -> None:
    peaks = {}
    for depth in (6, 12):
        source = save_tiny_model(
            tmp_path / f"source{depth}", "llama", num_hidden_layers=depth, hidden_size=512, intermediate_size=2048
        )
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(source), str(tmp_path / f"out{depth}")],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks[depth] = max(json.loads(done.stdout.splitlines()[-1]))
    # Six more layers of 17 MB in float32 would add 100 MB to some 400 MB if they stayed.
    assert peaks[12] < 1.1 * peaks[6]
