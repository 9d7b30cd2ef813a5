"""Every kernel against plain torch: under Triton's interpreter on a CPU, compiled where there is a CUDA device."""
