"""The Python packages that psrl's own metadata asks for."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from psrl import __version__
from psrl.doctor.finding import Finding, State

SECTION = "packages"
_NOT_LISTED = ("dev", "vllm", "sglang")
"""Extras for developers, and rollouts, which are looked for by module."""


def check_packages() -> Iterator[Finding]:
    yield Finding(SECTION, "python", State.OK, platform.python_version())
    try:
        requirements = [Requirement(text) for text in metadata.requires("psrl") or ()]
    except metadata.PackageNotFoundError:
        yield Finding(
            SECTION,
            "psrl",
            State.ABSENT,
            f"{__version__}, importable but not installed: versions of other packages are not checked",
            "pip install -e . in the source tree",
        )
        return
    yield Finding(SECTION, "psrl", State.OK, __version__)
    seen: set[str] = set()
    for extra, requirement in sorted(_by_extra(requirements), key=lambda pair: (pair[0] is not None, pair[0] or "")):
        if requirement.name not in seen:
            seen.add(requirement.name)
            yield find_package(requirement, extra)


def _by_extra(requirements: list[Requirement]) -> Iterator[tuple[str | None, Requirement]]:
    """Requirements for this machine, each with the extra that it belongs to."""
    extras = metadata.metadata("psrl").get_all("Provides-Extra") or []
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield None, requirement
            continue
        for extra in extras:
            if extra not in _NOT_LISTED and requirement.marker.evaluate({"extra": extra}):
                yield extra, requirement


def find_package(requirement: Requirement, extra: str | None) -> Finding:
    """
    Args:
        extra: whose package it is; None if psrl needs it.
    """
    asked = f"{requirement.name}{requirement.specifier}"
    try:
        found = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        if extra is None:
            return Finding(SECTION, requirement.name, State.WRONG, "not installed", f"pip install '{asked}'")
        return Finding(
            SECTION, requirement.name, State.ABSENT, f"not installed; of extra {extra}", f"pip install 'psrl[{extra}]'"
        )
    # A build's local label, as in 2.13.0+cpu, says nothing about the version.
    if not requirement.specifier.contains(Version(found).public, prereleases=True):
        return Finding(
            SECTION, requirement.name, State.WRONG, f"{found}, but psrl needs {asked}", f"pip install '{asked}'"
        )
    return Finding(SECTION, requirement.name, State.OK, found)
