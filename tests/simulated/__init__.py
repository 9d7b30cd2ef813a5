"""A simulated CUDA device: it computes numbers on the CPU and checks the rules of a GPU.

It finds errors that a CPU tolerates and a GPU does not: operands on two devices, memory that another stream still uses,
kernels that read past an allocation, and hosts that wait where they should run ahead. It records no graphs.
The entry point is `simulated_cuda`. The simulation says nothing about speed or about the code that Triton compiles.
"""
