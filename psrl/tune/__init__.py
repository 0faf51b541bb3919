"""Attention of a model's layers, measured on this device for the jobs that will run on it."""
