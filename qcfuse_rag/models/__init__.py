"""A transformers model and the facts that reuse depends on.

In: a model name, a folder or a GGUF file.
Out: a checked model, its measured rotations, windows and fingerprint.
"""
