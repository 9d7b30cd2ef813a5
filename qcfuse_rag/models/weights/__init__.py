"""Keep the weights of a model on a CPU in float16 or int8.

In: a loaded model, or the tensors of a GGUF file as they are read.
Out: the model with linear layers and embeddings in the format, and files of it.
"""
