"""Find the layers of a model that look at the answer: a `LayerProfile` from a model and questions."""
