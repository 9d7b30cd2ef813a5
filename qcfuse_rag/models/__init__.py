"""Load a transformers model and measure the properties that cache reuse depends on.

In: a model name, a folder or a GGUF file.
Out: a checked model, its rotations, its sliding windows and its fingerprint.
"""
