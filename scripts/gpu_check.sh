#!/usr/bin/env bash
# Check the kernels and the engine against their references on a CUDA device, then measure speed; nine minutes.
#   scripts/gpu_check.sh OUTDIR [SHAPE]
# Uses the python3 in PATH and no network; missing packages are installed from the folder of wheels named by WHEELS.
# Logs, JSON, Markdown and pictures go to OUTDIR.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=$(mkdir -p "${1:?usage: scripts/gpu_check.sh OUTDIR [SHAPE]}" && cd "$1" && pwd)
SHAPE=${2:-qwen3-8b}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TQDM_DISABLE=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRITON_INTERPRET=0
failed=0

# step SECONDS NAME COMMAND...: a step that exceeds its time is stopped, and the next step runs.
step() {
  local limit=$1 name=$2
  shift 2
  echo "== $name"
  timeout "$limit" "$@" > "$OUT/$name.log" 2>&1
  local code=$?
  tail -n 12 "$OUT/$name.log"
  if [ $code != 0 ]; then failed=1; echo "$name: exit code $code"; fi
}

qcfuse() { timeout "$1" python3 -c 'from qcfuse_rag.cli.app import main; main()' "${@:2}"; }

lacking() {
  python3 -c 'import sys; from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name.removeprefix("pytest-")) is None))' "$@"
}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$site:$PYTHONPATH"
wheels() { python3 -m pip install -q --no-index --no-deps --find-links "${WHEELS:-.}" --target "$site" "$@"; }
missing=$(lacking diskcache gguf hypothesis lazy_loader numpy pytest rich tokenizers torch transformers triton typer xxhash)
if [ -n "$missing" ] && ! wheels $missing; then
  echo "missing: $missing; put their wheels into a folder and name it by WHEELS"
  exit 2
fi
missing=$(lacking execnet pytest-xdist) # without them the tests run one after another
if [ -n "$missing" ]; then wheels $missing 2> /dev/null || true; fi

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$OUT/device.txt"
python3 -c 'import torch, transformers, triton; print(torch.__version__, transformers.__version__, triton.__version__)' \
  | tee -a "$OUT/device.txt"
workers=$(python3 -c 'import xdist' 2> /dev/null && echo "-n 8")
tests() { timeout "$1" python3 -m pytest $workers "${@:2}" -q -p no:cacheprovider -o addopts="--import-mode=importlib" --families=all; }
export -f tests
export workers
step 80 recorded bash -c 'tests 75 tests/runtime/graphs/test_decode_graphs.py tests/runtime/graphs/test_prefill_graphs.py'
step 110 kernels bash -c 'tests 105 tests/runtime/kernels --ignore=tests/runtime/kernels/test_compile.py \
  tests/runtime/fused_layers/test_fused_modules.py --maxfail=20'
step 70 parity bash -c 'tests 65 tests/gpu'
export -f qcfuse
step 170 speed bash -c 'qcfuse 165 bench speed --shape "$0" --context 10240,4096 --ratios "" --numbers model,int8 \
  --methods "auto[ratio=.05],auto[ratio=.1],auto[ratio=.2],auto[ratio=.1,layers=third_quarter]" \
  --tiers pinned,device --chunk 512 --repeats 3 --out "$1/speed.json"' "$SHAPE" "$OUT"
step 75 long bash -c 'qcfuse 70 bench speed --shape "$0" --context 32768 --ratios "" --tiers pinned,device \
  --methods "auto[ratio=.1],auto[ratio=.1,layers=third_quarter]" \
  --chunk 512 --repeats 2 --requests 1 --out "$1/long.json"' "$SHAPE" "$OUT"
cat "$OUT"/speed.md "$OUT"/long.md 2> /dev/null
exit $failed
