"""Fixtures of tests that need a CUDA device."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_measurements(tmp_path_factory):
    """Kernels run the default tiles, whatever ``psrl tune`` has found on this machine; nothing measured stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PSRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
