"""The library that commands share: a folder with a store, an index of passages, settings and the job's record.

In: a command's options.
Out: paths, an opened engine, what a question retrieves, and documents split into passages.
"""
