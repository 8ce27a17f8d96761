"""Published models by short name: one file each, with the raw configuration, what is shipped, and the evidence."""
