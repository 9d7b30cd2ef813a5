"""The command line's own small retriever."""
