"""RelayCaching (Geng et al., arXiv 2603.13289): reuse the caches of generated text.

`method` composes it, `answer_cache` stores generated answers.
"""
