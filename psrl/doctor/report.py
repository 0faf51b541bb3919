"""The findings as a table or as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json

from rich import box
from rich.table import Table
from rich.text import Text

from psrl.console import table_console
from psrl.doctor.finding import Finding, State

_STYLES = {State.OK: "green", State.ABSENT: "yellow", State.WRONG: "bold red"}


def print_findings(findings: list[Finding], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([dataclasses.asdict(f) | {"state": f.state.value} for f in findings], indent=1))
        return
    console = table_console()
    for section, members in itertools.groupby(findings, key=lambda finding: finding.section):
        table = Table("name", "state", "found", "to fix", title=section, title_justify="left", box=box.SIMPLE_HEAD)
        for f in members:
            table.add_row(Text(f.name), Text(f.state.value, _STYLES[f.state]), Text(f.detail), Text(f.fix))
        console.print(table)
    counts = {state: sum(finding.state is state for finding in findings) for state in State}
    console.print(", ".join(f"{count} {state.value}" for state, count in counts.items()))
