"""Run a forward pass over chosen rows.

In: a model, rows (token positions) and a buffer of keys and values.
Out: logits or hidden states; the rows' keys and values are in the buffer.
"""
