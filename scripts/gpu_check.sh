#!/usr/bin/env bash
# Run on a machine with a CUDA device: parity tests, then time to first token. Uses the python3 at hand.
#   scripts/gpu_check.sh [MODEL]
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TQDM_DISABLE=1 PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
python3 -m pytest tests/gpu tests/unit/test_kernels.py -q -p no:cacheprovider -o addopts=""
tests=$?
if [ $# -ge 1 ]; then
    python3 benchmarks/speed.py --model "$1" --device cuda --dtype bfloat16 --tokens 2000 4000 8000
fi
exit $tests
