"""KV events of a running engine: what its prefix cache holds, rebuilt from what it said."""
