"""Triton kernels of the fused pass.

Each file holds a kernel, its launcher and the plain torch code it is tested against.
`support` decides whether a device uses them.
"""
