"""Fixtures for every test."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: a busy machine is not a failure. On CI the examples are the same every time.
settings.register_profile("psrl", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("psrl")

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_finish() -> None:
    """What was imported is for good: collections of garbage need not walk it."""
    gc.freeze()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder with recorded traces and conformance cases: ``PSRL_SHARED``, or ``shared`` beside the repository."""
    folder = Path(os.environ.get("PSRL_SHARED", REPOSITORY.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared folder at {folder} (set PSRL_SHARED)")
    return folder
