"""Train a writer: low-rank weights that are used while passages are computed for the store."""
