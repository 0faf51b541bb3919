"""Every error that psrl raises on purpose.

A message carries the offending values and the way out. Subclasses also inherit the closest standard type, so that
callers who catch ``ValueError`` or ``NotImplementedError`` keep working.
"""


class PSRLError(Exception):
    """Root of psrl's errors."""


class ConfigError(PSRLError, ValueError):
    """A setting is out of range or contradicts another; the message names the key."""


class InputError(PSRLError, ValueError):
    """A sample file or batch is malformed; the message names the place (file and line, or sample)."""


class UnsupportedError(PSRLError, NotImplementedError):
    """Sharing is impossible with this option; the message names the option."""


class PlanError(PSRLError, AssertionError):
    """A plan violates an invariant. Always a bug in psrl, never a user's mistake."""


class MemoryBudgetError(PSRLError, MemoryError):
    """The KV budget cannot hold even one root path (with a host tier: one layer of it, or the host pool not the rest);
    the message says how much it would need."""

    sample: int | None = None
    """Index of the sample within the planned batch, where known."""
    micro_batch: int | None = None
    """Index of the micro-batch that needs too much, where known."""


class OutOfMemoryError(PSRLError, MemoryError):
    """An allocation failed while a plan ran. The caches are empty again; the message names the keys to change."""


class LossError(PSRLError, ValueError):
    """A loss function behaves in a way that its declared scope does not allow."""


class RolloutError(PSRLError, RuntimeError):
    """The rollout cannot generate: no weights, weights that do not fit the model, or logits that are not finite."""


class RankError(PSRLError, RuntimeError):
    """Another process of the training is gone or has failed; the message names its rank."""


class JobError(PSRLError, RuntimeError):
    """A process of a running job died; the message names it, and how to go on."""
