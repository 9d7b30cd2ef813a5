"""`qcfuse demo`: the same questions by full prefill and over reused caches.

In: the bundled documents and questions.
Out: pairs of answers, as a table or a page.
"""
