"""Recorded tokens, keys, values, queries and block tables of one context: format, writer, reader, checks."""
