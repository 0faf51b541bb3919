"""The analysis job: check, analyse, write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from psrl.analyze.analysis import analyze
from psrl.analyze.options import AnalyzeOptions
from psrl.analyze.page import make_page
from psrl.analyze.report import make_record
from psrl.files import check_targets, write_json, write_text


def run_analyze(options: AnalyzeOptions, note: Callable[[str], None]) -> dict[str, Any]:
    """Analyse, and write what the options ask for; nothing is written unless everything worked. Returns the record.

    Args:
        note: told what the user should know but did not ask for.

    Raises:
        PSRLError: the input, the shape or an option is not usable; the message is for the user.
    """
    check_targets({"--json": options.json, "--html": options.html}, options.files)
    analysis = analyze(options)
    if analysis.rows.silent_rows:
        note(f"{analysis.rows.silent_rows} chat rows have no assistant message and give no sample")
    record = make_record(analysis)
    if options.json is not None:
        write_json("--json", options.json, record)
    if options.html is not None:
        write_text("--html", options.html, make_page(record))
    return record
