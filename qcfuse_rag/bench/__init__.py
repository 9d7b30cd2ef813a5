"""The fair quality bench: the same questions, the same token ids, every method; records, summary, tables and plots."""
