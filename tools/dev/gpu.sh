#!/usr/bin/env bash
# On a machine with a GPU: its tests, then the bench of every geometry. Writes bench-results/gpu-*.json.
#
# Environment: BIN (the folder of pytest and kvstore), GEOMETRIES, and OUT (default bench-results).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=${BIN:?the folder of the environment\'s commands}
out=${OUT:-bench-results}
geometries=${GEOMETRIES:-llama-8b llama-70b-tp8 qwen-0.5b deepseek-mla}

"$bin/python" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "error: torch finds no GPU here")'
mkdir -p "$out"
"$bin/pytest" -m gpu tests/unit tests/conformance
failed=0
for geometry in $geometries; do
  "$bin/kvstore" bench --geometry "$geometry" --no-vllm --json >"$out/gpu-$geometry.json" || failed=1
done
echo "wrote $out/gpu-*.json"
exit $failed
