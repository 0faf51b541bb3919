"""The driver's trainers and the workers that they start: placement, advantages, rollouts, weights, checkpoints."""
