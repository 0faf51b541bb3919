"""What this installation can run, and how to fix what it cannot."""

from psrl.doctor.examine import examine
from psrl.doctor.finding import Finding, State

__all__ = ["Finding", "State", "examine"]
