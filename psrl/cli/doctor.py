"""``psrl doctor``: its options, and nothing else."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")]


def doctor(as_json: AsJson = False) -> None:
    """Say what this installation can run, and how to fix what it cannot. Exit code 1 if something has to be fixed."""
    from psrl.doctor import State, examine
    from psrl.doctor.report import print_findings

    findings = examine()
    print_findings(findings, as_json=as_json)
    if any(finding.state is State.WRONG for finding in findings):
        raise typer.Exit(1)
