"""Measures what a cycle of each gear costs: the tables that the cost gate chooses by."""
