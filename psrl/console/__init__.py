"""Where commands print their tables."""

from __future__ import annotations

from rich.console import Console

NO_TERMINAL_WIDTH = 140
"""Columns of tables in a file or a pipe."""


def table_console() -> Console:
    """Standard output, without highlighting; as wide as the terminal, where it is one."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=NO_TERMINAL_WIDTH)
