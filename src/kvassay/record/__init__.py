"""Getting models, and recording what their attention layers see into traces."""
