#!/usr/bin/env bash
# Set up the environment and run the tests; arguments go to pytest.
#
#   scripts/test.sh                     the default suite
#   scripts/test.sh -m slow             the slow tests instead
#   scripts/test.sh tests/unit -k tree  a part of it
#
# Settings, all optional:
#   PSRL_VENV        environment (default: .venv in the repository)
#   PSRL_SHARED      folder with recorded traces and conformance cases (default: ../shared); without it the tests that
#                    need it are skipped with that reason
#   OMP_NUM_THREADS  threads of one process (default: all cores, at most 4: the tests' tensors are small)
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="${PSRL_VENV:-$repo/.venv}"
"$repo/scripts/setup.sh" "$venv"

cores="$(getconf _NPROCESSORS_ONLN)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores < 4 ? cores : 4))}"
export PSRL_SHARED="${PSRL_SHARED:-$(dirname "$repo")/shared}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=disabled

cd "$repo"
exec "$venv/bin/python" -m pytest "$@"
