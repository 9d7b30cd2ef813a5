"""Profiles: which layers of a model look at the answer, measured once and kept beside its store."""
