"""A trained model as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psrl.data.tokenizer import BYTES
from psrl.errors import InputError

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json", "*.gguf")


def check_out(out: Path) -> None:
    """Check, before anything runs, that the model can be written.

    Raises:
        InputError: the folder holds something already, or the folder around it is missing or not writable.
    """
    parent = out.absolute().parent
    if not parent.is_dir():
        raise InputError(f"--out {out}: the folder {parent} does not exist")
    if not os.access(parent, os.W_OK):
        raise InputError(f"--out {out}: the folder {parent} is not writable")
    try:
        taken = out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir())))
    except OSError as error:  # a name that the file system does not take
        raise InputError(f"--out {out}: {error.strerror or error}") from error
    if taken:
        raise InputError(f"--out {out}: exists and is not an empty folder: name another")


def tokenizer_source(tokenizer: str | None) -> Path | None:
    """What ``write_model`` copies a tokenizer from, of a ``--tokenizer`` option: nothing for the built-in bytes and for
    files that transformers does not read."""
    if tokenizer is None or tokenizer == BYTES or tokenizer.endswith(".tiktoken"):
        return None
    return Path(tokenizer)


def write_model(out: Path, source: Path, tokenizer: Path | None, weights: Mapping[str, Any], dtype: str) -> None:
    """Write ``weights`` with what else ``source`` holds (config, tokenizer). ``out`` appears whole or not at all.

    Args:
        tokenizer: folder or ``tokenizer.json`` to use instead of the source's; None keeps the source's.
        dtype: of the weights, for ``config.json``.

    Raises:
        InputError: ``out`` cannot be written.
    """
    from safetensors.torch import save_file

    try:
        staging = Path(tempfile.mkdtemp(dir=out.absolute().parent, prefix=f".{out.name}."))
        try:
            shutil.copytree(
                source, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_WEIGHTS, "README*", ".*")
            )
            if tokenizer is not None:
                folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
                for file in folder.glob("*token*"):
                    shutil.copyfile(file, staging / file.name)
            config = json.loads((staging / "config.json").read_text(encoding="utf-8"))
            config.pop("torch_dtype", None)
            text = json.dumps({**config, "dtype": dtype}, indent=2) + "\n"
            (staging / "config.json").write_text(text, encoding="utf-8")
            save_file({name: weight.contiguous() for name, weight in weights.items()}, staging / "model.safetensors",
                      metadata={"format": "pt"})  # fmt: skip
            mode = staging.parent.stat().st_mode & 0o777
            staging.chmod(mode)
            for file in staging.iterdir():
                file.chmod(mode & 0o666)
            staging.rename(out)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot write: {error.strerror or error}") from error
