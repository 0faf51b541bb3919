"""``psrl sft``: supervised training on recorded traces, as a warm start for reinforcement learning."""
