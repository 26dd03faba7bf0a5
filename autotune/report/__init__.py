"""Outputs of a finished run."""
