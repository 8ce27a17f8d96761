"""Hardware files: what a machine's memory and matrix units can do, with sources. One TOML per machine."""
