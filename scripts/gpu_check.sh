#!/usr/bin/env bash
# Is this machine good for training? On one CUDA GPU: trains llama_debug, resumes it, then a few steps
# of llama_1b, eager and compiled, and prints tokens/s, MFU and memory. Nothing is downloaded: without an environment
# that has the packages of pyproject.toml (active, or made by ./run_train.sh --setup-only) it says so. A few minutes.
# Usage: scripts/gpu_check.sh [--cpu] [OUTPUT_FOLDER]      --cpu: the same on the CPU, with llama_1b made small.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$("$root/scripts/setup.sh" --find)
device=cuda
if [ "${1-}" = --cpu ]; then
    device=cpu
    export CUDA_VISIBLE_DEVICES=""
    shift
fi
out=${1:-$(mktemp -d "${TMPDIR:-/tmp}/gpu_check.XXXXXX")}
cd "$root"

"$python" - "$device" <<'PY'
import platform, sys, torch
print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}")
if sys.argv[1] == "cuda":
    if not torch.cuda.is_available():
        sys.exit("gpu_check: torch sees no CUDA GPU; use --cpu for the dry mode")
    print(f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}")
PY

train() { # $1: run name, then options
    local name=$1
    shift
    echo "== $name"
    ./run_train.sh --nproc 1 --run.device "$device" --run.output_dir "$out" --run.name "$name" --metrics.log_freq 1 "$@"
}

debug=(--config llama_debug.toml --validation.freq 10 --checkpoint.interval 10 --lr_scheduler.warmup_steps 5)
[ "$device" = cuda ] || debug+=(--training.global_batch_size 6 --training.local_batch_size 6 --training.seq_len 128)
train llama_debug "${debug[@]}" --training.steps 20
train llama_debug "${debug[@]}" --training.steps 30 # resumes

large=(--config llama_1b.toml --checkpoint.enable false --validation.enable false --training.mixed_precision_param bfloat16
    --activation_checkpoint.mode none)
if [ "$device" = cpu ]; then
    large+=(--model.dim 128 --model.n_layers 2 --model.n_heads 4 --model.n_kv_heads 2 --model.head_dim 32
        --model.ffn_dim 256 --model.vocab_size 4096 --training.seq_len 128
        --training.global_batch_size 4 --training.local_batch_size 2 --training.steps 4)
else
    large+=(--training.seq_len 4096 --training.global_batch_size 8 --training.local_batch_size 2 --training.steps 8)
fi
train llama_1b_eager "${large[@]}"
train llama_1b_compiled "${large[@]}" --compile.enable true
train llama_1b_recomputed "${large[@]}" --activation_checkpoint.mode full

"$python" - "$out" <<'PY'
import json, pathlib, statistics, sys

print(f"\n{'run':24}{'loss first':>11}{'last':>9}{'tokens/s':>11}{'MFU':>8}{'GiB':>8}")
curves = {}
for name in ("llama_debug", "llama_1b_eager", "llama_1b_compiled", "llama_1b_recomputed"):
    rows = [json.loads(line) for line in pathlib.Path(sys.argv[1], name, "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, len(rows) + 1)), f"{name}: steps {steps}"
    curves[name] = [row["loss"] for row in rows]
    late = rows[len(rows) // 2 :]  # the first steps compile and warm up
    rate, mfu = (statistics.median(row[key] for row in late) for key in ("tokens_per_second", "mfu"))
    losses = curves[name]
    print(f"{name:24}{losses[0]:11.4f}{losses[-1]:9.4f}{rate:11,.0f}{mfu:8.1%}{rows[-1]['peak_memory_gib']:8.2f}")
assert len(curves["llama_debug"]) == 30 and curves["llama_debug"][-1] < curves["llama_debug"][0] - 0.5, "it did not learn"
for name in ("llama_1b_compiled", "llama_1b_recomputed"):
    gap = max(abs(a - b) / b for a, b in zip(curves[name], curves["llama_1b_eager"], strict=True))
    print(f"{name}: losses within {gap:.1e} of eager")
    assert gap < 0.02, f"{name} trains another curve than eager"
print("gpu_check: good")
PY
