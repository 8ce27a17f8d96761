"""Rows that no model made: the statistics of recorded heads, drawn at any length and for any layer shape."""
