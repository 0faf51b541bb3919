"""Which sample goes to which (mini-batch, rank) cell: what rows share, and a search for the shortest critical path.

NumPy only: the trainer, training without Ray and the simulator place with the same code.
"""
