#!/usr/bin/env bash
# On a machine with a GPU. Needs no installation, no network and no vLLM: it runs in the checkout.
#
#   tools/dev/gpu.sh bench                    tests and speed (make bench-gpu)
#   tools/dev/gpu.sh visit                    a whole visit, within 25 minutes: tests, order, speed, traces
#   tools/dev/gpu.sh visit --only 'moves-*'   some of its steps
#
# Environment: PYTHON (python3; the one that has torch) or BIN (the folder of an environment's commands). Results go to
# bench-results, or --out. Exits with 1 if a step failed, with 2 if nothing can run: it says what is missing.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-${BIN:+$BIN/python}}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${python:-python3}" -m kvstore.tools.bench.gpu "${@:-bench}"
