"""An OpenAI-compatible endpoint.

In: chat requests.
Out: answers, from one process under uvicorn or from replicas on Ray Serve.
"""
