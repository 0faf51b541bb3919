"""Training on stored traces without Ray: policy gradient with given advantages, or supervised, under ``torchrun``."""
