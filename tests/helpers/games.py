"""One small TextWorld game for all tests of a process: making one takes seconds."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

TASK = {"seed": 3, "num_rooms": 2, "num_objects": 3, "quest_length": 2}
"""Won by: take latchkey, unlock safe with latchkey."""
WINNING = ["take latchkey", "unlock safe with latchkey"]


@functools.cache
def games_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="psrl-games-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def textworld_task(**values: Any) -> dict[str, Any]:
    return {**TASK, "games": str(games_folder()), **values}
