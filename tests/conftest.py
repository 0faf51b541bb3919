"""Fixtures for every test."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder with recorded traces and conformance cases: ``PSRL_SHARED``, or ``shared`` beside the repository."""
    folder = Path(os.environ.get("PSRL_SHARED", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared folder at {folder} (set PSRL_SHARED)")
    return folder
