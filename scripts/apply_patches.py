"""Apply, check or revert the patches that patches/series.toml lists (see patches/README.md).

Every file a patch touches is known by its SHA-256 before and after, so the state of an installation is read off the
files themselves; a file that is neither is refused, never patched by guess. New contents are made and verified in a
scratch folder first, so a patch that fails changes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

REPOSITORY = Path(__file__).resolve().parent.parent


class PatchError(Exception):
    """A patch cannot be applied or reverted; the message says what to do."""


@dataclass(frozen=True)
class Target:
    """One file that a patch changes."""

    path: str
    """Relative to the folder of packages, as in the patch without its a/ and b/."""
    before: str
    """SHA-256 of the file that the patch expects."""
    after: str
    """SHA-256 of the file that the patch leaves."""


@dataclass(frozen=True)
class Patch:
    file: Path
    package: str
    versions: tuple[str, ...]
    targets: tuple[Target, ...]

    @property
    def name(self) -> str:
        return self.file.name


def read_series(path: Path) -> list[Patch]:
    """Patches in the order in which they apply. Raises PatchError if an entry lacks a key or its patch file."""
    with path.open("rb") as stream:
        entries: list[dict[str, Any]] = tomllib.load(stream).get("patch", [])
    patches: list[Patch] = []
    for entry in entries:
        required = {"file", "package", "versions", "reason", "upstream", "remove_when", "target"}
        if missing := required - entry.keys():
            raise PatchError(f"{path}: entry {entry.get('file', '?')} lacks {', '.join(sorted(missing))}")
        targets = tuple(Target(t["path"], t["before"], t["after"]) for t in entry["target"])
        patch = Patch(path.parent / entry["file"], entry["package"], tuple(entry["versions"]), targets)
        if not patch.file.is_file():
            raise PatchError(f"{path}: no patch file {patch.file}")
        patches.append(patch)
    return patches


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_version(patch: Patch, root: Path) -> None:
    installed = [d.version for d in metadata.distributions(name=patch.package, path=[str(root)])]
    if not installed:
        raise PatchError(f"{patch.name}: {patch.package} is not installed in {root}")
    if installed[0] not in patch.versions:
        raise PatchError(
            f"{patch.name} is for {patch.package} {', '.join(patch.versions)}, but {root} holds {installed[0]}: "
            f"install a version it knows, or renew the patch"
        )


def is_applied(patch: Patch, series: list[Patch], root: Path) -> bool:
    """Whether all of the patch's files hold its result, or the result of a later patch of the series.

    Raises PatchError if a file is in no known state, or the files disagree.
    """
    states: dict[str, bool] = {}
    position = series.index(patch)
    for target in patch.targets:
        file = root / target.path
        if not file.is_file():
            raise PatchError(f"{patch.name}: no file {file}")
        digest = sha256(file)
        later = {t.after for p in series[position:] for t in p.targets if t.path == target.path}
        earlier = {t.before for p in series[: position + 1] for t in p.targets if t.path == target.path}
        if digest not in later | earlier:
            raise PatchError(
                f"{patch.name}: {file} is neither the original nor patched (sha256 {digest}): reinstall {patch.package}"
            )
        states[target.path] = digest in later
    if len(set(states.values())) > 1:
        raise PatchError(f"{patch.name}: only some of its files are patched: reinstall {patch.package}")
    return all(states.values())


def run_patch(patch: Patch, root: Path, *, revert: bool) -> None:
    """Change the patch's files under ``root``: all of them, or none and a PatchError."""
    with tempfile.TemporaryDirectory() as scratch_name:
        scratch = Path(scratch_name).resolve()
        for target in patch.targets:
            copy = scratch / target.path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / target.path, copy)
        command = ["git", "apply", *(["--reverse"] if revert else []), str(patch.file.resolve())]
        # The ceiling keeps git from taking the scratch folder for a part of some repository around it.
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(scratch.parent)}
        result = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise PatchError(f"{patch.name} does not apply: {result.stderr.strip()}")
        for target in patch.targets:
            expected = target.before if revert else target.after
            if (digest := sha256(scratch / target.path)) != expected:
                raise PatchError(f"{patch.name} makes {target.path} {digest}, but the series says {expected}")
        for target in patch.targets:
            staged = root / f"{target.path}.psrl-new"
            shutil.copy2(scratch / target.path, staged)
            os.replace(staged, root / target.path)


def check(series: list[Patch], root: Path) -> int:
    missing = [patch for patch in series if not is_applied(patch, series, root)]
    for patch in series:
        print(f"{'missing' if patch in missing else 'applied'}  {patch.name}")
    return 1 if missing else 0


def apply(series: list[Patch], root: Path) -> int:
    for patch in series:
        if is_applied(patch, series, root):
            print(f"already applied  {patch.name}")
            continue
        run_patch(patch, root, revert=False)
        print(f"applied  {patch.name}")
    return 0


def revert(series: list[Patch], root: Path) -> int:
    for patch in reversed(series):
        if not is_applied(patch, series, root):
            print(f"not applied  {patch.name}")
            continue
        run_patch(patch, root, revert=True)
        print(f"reverted  {patch.name}")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="apply_patches", description="Patch the installed upstream packages.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="change nothing; exit 1 unless all are applied")
    action.add_argument("--revert", action="store_true", help="take the patches out again")
    parser.add_argument("--root", type=Path, default=Path(sysconfig.get_path("purelib")), help="folder of packages")
    parser.add_argument("--series", type=Path, default=REPOSITORY / "patches" / "series.toml")
    options = parser.parse_args(argv)
    try:
        series = read_series(options.series)
        if not series:
            print("no patches: every hook goes through an extension point of the upstreams")
            return 0
        for patch in series:
            check_version(patch, options.root)
        step = check if options.check else revert if options.revert else apply
        return step(series, options.root)
    except (PatchError, OSError, tomllib.TOMLDecodeError) as error:
        print(f"apply_patches: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
