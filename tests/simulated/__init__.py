"""A CUDA device that is simulated: its numbers are computed on the CPU, its rules are kept.

What a CPU forgives and a GPU does not is found without one: operands on two devices, memory that another stream is not
done with, kernels that read past an allocation, recorded graphs over memory that is gone, hosts that wait where a graph
is recorded. `simulated_cuda` is the way in. It says nothing about speed, and nothing about what Triton compiles to.
"""
