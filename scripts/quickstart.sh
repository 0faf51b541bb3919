#!/usr/bin/env bash
# From nothing to an RL job with prefix sharing: set up the environment, make TextWorld games and a tiny model, run three
# steps of step-wise GRPO with two Megatron workers under Ray, then replay traces of the games with and without sharing.
#
#   scripts/quickstart.sh [OVERRIDE...]    overrides go to `psrl train`, for example psrl.enable=false
#
# Settings, all optional:
#   PSRL_VENV   environment (default: .venv in the repository)
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="${PSRL_VENV:-$repo/.venv}"
"$repo/scripts/setup.sh" "$venv"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=disabled

cd "$repo"
work=outputs/quickstart
log="$work/train.log"
mkdir -p "$work"

if [[ ! -f $work/model/model.safetensors ]]; then
    "$venv/bin/python" -m psrl.models.tiny_chat "$work/model" >&2
fi
if [[ ! -f $work/data/val.parquet ]]; then
    echo "quickstart: making TextWorld games in $work/data" >&2
    "$venv/bin/python" -m psrl.agents.dataset textworld --out "$work/data" --train 8 --val 2 >&2
fi
if [[ ! -f traces/textworld_step.jsonl.gz || ! -f traces/textworld_tree.jsonl.gz ]]; then
    echo "quickstart: playing TextWorld games into traces/" >&2
    "$venv/bin/python" -m psrl.agents.textworld_traces --out traces --tasks 2 --trials 3 --branches 2 --objects 2 \
        --quest-length 3 --max-turns 6 >&2
fi

# veRL prints its whole configuration and Ray every worker's warnings: the log has all of it, the terminal psrl's lines.
command=(train --config-name cpu_quickstart 'trainer.logger=[file]' "$@")
printf '\n$ psrl %s    # log: %s\n' "${command[*]}" "$log"
if ! VERL_FILE_LOGGER_PATH="$repo/$work/metrics.jsonl" "$venv/bin/psrl" "${command[@]}" 2>&1 | tee "$log" |
    sed -nu 's/^.*\(psrl: .*\)$/\1/p'; then
    tail -n 40 "$log" >&2
    echo "quickstart: the job failed; the whole log is $log" >&2
    exit 1
fi

for trace in step tree; do
    command=(replay "traces/textworld_$trace.jsonl.gz" --model tiny-qwen2 --mode step --sharing both)
    printf '\n$ psrl %s\n' "${command[*]}"
    "$venv/bin/psrl" "${command[@]}"
done
