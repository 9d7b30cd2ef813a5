"""An OpenAI-compatible endpoint: one process under uvicorn, or replicas on Ray Serve."""
