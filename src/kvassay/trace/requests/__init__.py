"""Request traces: who asked when, how long, and which prompt blocks two requests have in common."""
