"""Answer quality: records, tables and plots from a model, methods and questions."""
