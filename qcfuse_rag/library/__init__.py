"""A library of documents: a folder with a store, an index of passages, settings and the record of its last job.

In: files of documents, or documents from clients.
Out: passages, what a question retrieves, and the engine's answers over them.
"""
