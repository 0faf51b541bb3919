"""How the commands declare their options."""

from __future__ import annotations

from typing import Any

import typer


def option(panel: str, text: str, choices: tuple[str, ...] = (), **kwargs: Any) -> Any:
    """An option in a panel of the help.

    Args:
        choices: named in the help; the command checks them.
        kwargs: of ``typer.Option``.
    """
    return typer.Option(
        help=text + (f" One of {', '.join(choices)}." if choices else ""), rich_help_panel=panel, **kwargs
    )
