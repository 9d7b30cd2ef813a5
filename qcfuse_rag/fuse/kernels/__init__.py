"""Triton kernels of the fused pass. Each file holds a kernel, its launcher and the plain torch it is tested against."""
