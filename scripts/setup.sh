#!/usr/bin/env bash
# Create or refresh psrl's Python environment. Quick when nothing has changed since the last time.
#
#   scripts/setup.sh [VENV]            VENV defaults to .venv in the repository
#
# Settings, all optional:
#   PSRL_PYTHON       base interpreter (default: the first usable of python3.11, python3.12, python3.10, python3)
#   PSRL_TORCH        requirement for torch (default: torch==2.13.0)
#   PSRL_EXTRAS       extras of pyproject.toml (default: dev,textworld,tokenizers,search)
#   PSRL_CONSTRAINTS  constraints file (default: constraints-cpu.txt; empty for none)
#
# On a GPU machine, for example:
#   PSRL_TORCH='torch==2.11.0' PSRL_EXTRAS=dev,textworld,gpu PSRL_CONSTRAINTS= scripts/setup.sh
#
# Indexes, proxies and find-links come from pip's own configuration. On x86-64 Linux the default index serves torch
# with CUDA (several GB): for a smaller environment give pip the index of PyTorch's CPU wheels as an extra index.
set -euo pipefail

readonly DEFAULT_TORCH="torch==2.13.0"

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

say() {
    printf 'setup: %s\n' "$*" >&2
}

usable_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}

find_python() {
    if [[ -n "${PSRL_PYTHON:-}" ]]; then
        usable_python "$PSRL_PYTHON" || die "PSRL_PYTHON=$PSRL_PYTHON is not Python 3.10 to 3.12 with venv and ensurepip"
        printf '%s\n' "$PSRL_PYTHON"
        return
    fi
    local candidate
    for candidate in python3.11 python3.12 python3.10 python3; do
        if usable_python "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "found no Python 3.10 to 3.12 with venv and ensurepip on PATH: install one (on Debian or Ubuntu the package" \
        "python3-venv) or set PSRL_PYTHON"
}

# What decides the content of the environment; a change of any of it runs the installation again.
fingerprint() {
    {
        "$1" -c 'import sys; print(sys.version)'
        printf '%s\n' "$repo" "$torch" "$extras" "$constraints"
        cat "$repo/pyproject.toml" "$repo/scripts/setup.sh"
        grep '^__version__' "$repo/psrl/__init__.py"
        find "$repo/patches" -type f -print0 | sort -z | xargs -0 cat
        if [[ -n "$constraints" ]]; then cat "$constraints"; fi
    } | sha256sum | cut -d' ' -f1
}

check_existing() {
    [[ -x "$venv/bin/python" ]] || return 0
    local minor='import sys; print("%d.%d" % sys.version_info[:2])'
    local have want
    have="$("$venv/bin/python" -c "$minor")" || die "$venv/bin/python does not run: remove $venv and try again"
    want="$("$base" -c "$minor")"
    [[ "$have" == "$want" ]] || die "$venv has Python $have, but $want was asked for: remove it or name another folder"
}

check_compiler() {
    [[ ",$extras," == *,textworld,* ]] || return 0
    local tool
    for tool in cc make; do
        command -v "$tool" >/dev/null ||
            die "'$tool' is missing: textworld compiles its interpreter on installation (on Debian or Ubuntu:" \
                "apt-get install build-essential), or leave it out with PSRL_EXTRAS=dev,tokenizers"
    done
}

install_packages() {
    local python="$1"
    local -a pins=()
    if [[ -n "$constraints" ]]; then
        # torch is pinned by PSRL_TORCH, which may differ from the file.
        grep -v '^torch==' "$constraints" >"$venv/constraints.txt"
        pins=(-c "$venv/constraints.txt")
    fi
    "$python" -m pip install --quiet --upgrade 'pip>=25.1'
    # torch in the same command: else pip chooses a build of it by itself.
    "$python" -m pip install --quiet "${pins[@]}" "$torch" -e "$repo${extras:+[$extras]}"
}

repo="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
[[ $# -le 1 && "${1:-}" != -* ]] || die "usage: scripts/setup.sh [VENV] (the settings are at the top of the script)"
venv="${1:-$repo/.venv}"
torch="${PSRL_TORCH:-$DEFAULT_TORCH}"
extras="${PSRL_EXTRAS-dev,textworld,tokenizers,search}"
constraints="${PSRL_CONSTRAINTS-$repo/constraints-cpu.txt}"
[[ -z "$constraints" || -f "$constraints" ]] || die "no constraints file $constraints"

base="$(find_python)"
wanted="$(fingerprint "$base")"
stamp="$venv/.psrl-setup"
if [[ -x "$venv/bin/python" && -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
    exit 0
fi

check_existing
check_compiler
say "installing into $venv with $("$base" --version) and $torch (a few minutes the first time)"
rm -f "$stamp"
"$base" -m venv "$venv"
install_packages "$venv/bin/python"
"$repo/scripts/apply_patches.sh" --python "$venv/bin/python"
printf '%s\n' "$wanted" >"$stamp"
say "done: source $venv/bin/activate"
