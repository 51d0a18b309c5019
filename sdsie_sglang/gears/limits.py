"""What every gear obeys."""

MAX_K = 7
"""Draft tokens of the widest cycle."""

MAX_SCHEDULE = 65536
"""Cycles of a written schedule: a client of a running server may send one."""
