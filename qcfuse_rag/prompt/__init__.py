"""Prompts as segments of token ids."""
