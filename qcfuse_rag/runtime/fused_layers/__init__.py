"""Views of a model with fewer kernels a layer, for passes that are recorded.

In: a transformers model.
Out: the same model with fused norms, rotations and gates. No GPU has run them yet.
To remove this folder, delete it and its lines in runtime/runner.py.
"""
