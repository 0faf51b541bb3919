"""Fixtures for tests that run on several ranks."""

import functools

import pytest

from tests.helpers import make_checkpoint
from tests.helpers.ranks import RankPool


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Four ranks, started when first used."""
    pool = RankPool(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Makes checkpoints, each once."""

    @functools.cache
    def make(kind="qwen3", tied=False, layers=4, **sizes):
        return make_checkpoint(tmp_path_factory.mktemp(kind), kind, tied, layers=layers, **sizes)

    return make
