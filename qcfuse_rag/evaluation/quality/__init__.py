"""Compare the answers of methods.

In: questions with passages and gold answers, and methods.
Out: one record a question and configuration, summaries, tables and plots.
"""
