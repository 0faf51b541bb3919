"""What prefix sharing is worth for given data: exact counts, predictions for a model shape, and what breaks it.

NumPy only, never torch. Memory grows with the distinct tokens, not with all of them.
"""
