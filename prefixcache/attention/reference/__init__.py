"""Slow and obvious float64 twins of the operations: what the fast paths must equal."""
