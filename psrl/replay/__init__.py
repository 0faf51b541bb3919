"""Replaying recorded samples through veRL's worker: old log-prob, reference and update, with and without sharing."""
