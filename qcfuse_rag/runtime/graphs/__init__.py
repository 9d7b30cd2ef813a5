"""Record passes and decode steps as CUDA graphs.

In: a model and the sizes to record.
Out: runners that replay a graph where one fits and launch kernels otherwise.
"""
