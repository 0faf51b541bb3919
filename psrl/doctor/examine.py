"""All checks, in the order in which they are worth fixing."""

from __future__ import annotations

from psrl.doctor.finding import Check, Finding, State


def examine() -> list[Finding]:
    """Look at the installation. Takes some seconds; changes nothing in it or in this process."""
    from psrl.doctor.packages import check_packages

    findings = list(check_packages())
    if any(f.name == "torch" and f.state is State.WRONG for f in findings):
        return findings
    from psrl.doctor.devices import check_backends, check_devices
    from psrl.doctor.parts import check_parts
    from psrl.doctor.wiring import check_patches, check_wiring

    checks: tuple[Check, ...] = (check_devices, check_backends, check_wiring, check_patches, check_parts)
    for check in checks:
        findings.extend(check())
    return findings
