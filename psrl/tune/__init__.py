"""``psrl tune``: attention of a model's layers, measured on this device for the jobs that will run on it."""

from psrl.tune.job import TuneOptions, run_tune

__all__ = ["TuneOptions", "run_tune"]
