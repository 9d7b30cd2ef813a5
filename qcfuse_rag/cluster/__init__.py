"""Warming on many machines, with Ray."""
