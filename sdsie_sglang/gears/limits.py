"""What every gear obeys."""

MAX_K = 7
"""Draft tokens of the widest cycle."""
