"""Views of a model with fewer kernels a layer, for all passes where kernels are used.

In: a transformers model.
Out: the same model with fused norms, rotations, gates and products of a few rows.
To remove this folder, delete it and its lines in runtime/language_model.py and runtime/runner.py.
"""
