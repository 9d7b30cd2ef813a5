"""Views of a model with fewer kernels a layer, for passes that are recorded.

In: a transformers model.
Out: the same model with fused norms, rotations, gates and products. No GPU has run them yet.
To remove this folder, delete it, its two lines in runtime/runner.py and the products of the study `kernel_floors`.
"""
