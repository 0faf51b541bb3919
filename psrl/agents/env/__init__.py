"""Environments behind one small interface; each in its own module, imported when it is asked for."""

from psrl.agents.env.base import Environment, EnvironmentFault, Observation, make_environment

__all__ = ["Environment", "EnvironmentFault", "Observation", "make_environment"]
