"""Agents and the environments they act in."""
