"""Models that psrl can make a Hugging Face folder of by name."""

from __future__ import annotations

from pathlib import Path

NAMED_MODELS = ("smollm2",)
"""What ``named_model_folder`` takes."""


def named_model_folder(name: str) -> Path:
    """A Hugging Face folder with config, float32 weights and tokenizer; made once, then cached (``cache_dir``).

    Raises:
        InputError: a package that it is made from is not installed, or the cache is not writable; says what to do.
    """
    from psrl.models.smollm2 import smollm2_folder

    assert name in NAMED_MODELS, name
    return smollm2_folder()
