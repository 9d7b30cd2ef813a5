"""Find the layers of a model that look at the answer.

In: a model and questions.
Out: a `LayerProfile`.
"""
