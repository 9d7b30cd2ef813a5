"""Triton kernels of the fused pass.

Each kernel has a launcher, and plain torch code that it is tested against, here or in `runtime`.
`support` decides whether a device uses them.
"""
