"""What a model's KV cache looks like: components, geometry, groups and bytes per token. No torch here."""
