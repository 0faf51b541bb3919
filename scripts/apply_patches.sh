#!/usr/bin/env bash
# Apply psrl's patches to the installed upstream packages. Running it again changes nothing.
#
#   scripts/apply_patches.sh             apply what is missing
#   scripts/apply_patches.sh --check     change nothing; exit 1 unless all are applied
#   scripts/apply_patches.sh --revert    take them out again
#
#   --python PYTHON   interpreter whose packages are meant (default: .venv/bin/python in the repository)
#   --root DIR        folder of packages instead of that interpreter's site-packages
#   --series FILE     list of patches (default: patches/series.toml)
set -euo pipefail

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
python="$repo/.venv/bin/python"
args=()
while [[ $# -gt 0 ]]; do
    if [[ "$1" == --python ]]; then
        [[ $# -ge 2 ]] || { echo "apply_patches: --python needs a value" >&2; exit 2; }
        python="$2"
        shift 2
    else
        args+=("$1")
        shift
    fi
done
command -v "$python" >/dev/null || {
    echo "apply_patches: no interpreter $python: run scripts/setup.sh first, or name one with --python" >&2
    exit 2
}
exec "$python" "$repo/scripts/apply_patches.py" "${args[@]}"
