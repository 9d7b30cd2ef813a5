"""OpenAI's forms of requests and answers.

In: bodies as JSON, and the engine's pieces of answers.
Out: checked requests, and events and answers as JSON. Nothing here knows routes or connections.
"""
