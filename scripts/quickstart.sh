#!/usr/bin/env bash
# From nothing to a measured replay: set up the environment, make real agent traces with TextWorld (step-wise and
# tree), and run old log-prob, reference and update over them with and without prefix sharing.
#
#   scripts/quickstart.sh [OPTION...]    options go to `psrl replay`, for example --model tiny-qwen3
#
# Settings, all optional:
#   PSRL_VENV   environment (default: .venv in the repository)
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="${PSRL_VENV:-$repo/.venv}"
"$repo/scripts/setup.sh" "$venv"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=disabled

cd "$repo"
if [[ ! -f traces/textworld_step.jsonl.gz || ! -f traces/textworld_tree.jsonl.gz ]]; then
    echo "quickstart: playing TextWorld games into traces/" >&2
    "$venv/bin/python" -m psrl.agents.textworld_traces --out traces --tasks 2 --trials 3 --branches 2 --objects 2 \
        --quest-length 3 --max-turns 6
fi

for trace in step tree; do
    command=("$venv/bin/psrl" replay "traces/textworld_$trace.jsonl.gz" --model tiny-qwen2 --mode step --sharing both "$@")
    printf '\n$ psrl %s\n' "${command[*]:1}"
    "${command[@]}"
done
