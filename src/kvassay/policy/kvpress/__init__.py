"""Presses of kvpress as a policy: they run in kvpress's own environment, in a process of their own."""
