"""Online: place stored keys and values, probe, select, recompute."""
