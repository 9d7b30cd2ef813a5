"""Every kernel against plain torch: in Triton's interpreter on a CPU, compiled on a CUDA device."""
