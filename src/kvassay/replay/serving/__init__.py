"""Serving: many requests over one block pool, a policy entering by its measured footprint."""
