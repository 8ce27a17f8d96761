"""Thresholds declared beforehand, and the verdicts they give."""
