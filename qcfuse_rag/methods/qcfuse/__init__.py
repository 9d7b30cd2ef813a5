"""QCFuse: the method, its critical layers and their profile, and the rankings of anchors that it may use.

In: a prompt whose stored chunks are placed.
Out: the passage tokens that the question attends to in few layers.
"""
