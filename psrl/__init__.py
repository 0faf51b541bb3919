"""psrl: exact prefix sharing for reinforcement learning of agents on veRL and Megatron-LM."""

__version__ = "0.1.0"
