"""A transformers model and what fusion needs to know about it."""
