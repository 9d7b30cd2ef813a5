"""Time to first token, decode rate and memory, beside transformers and the limits of the machine."""
