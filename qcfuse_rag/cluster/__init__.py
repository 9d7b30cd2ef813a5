"""Read, embed and warm documents on many machines with Ray.

In: paths, texts or planned batches.
Out: passages, vectors, or entries in a shared store.
"""
