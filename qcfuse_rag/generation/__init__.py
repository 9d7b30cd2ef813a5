"""From logits to text.

In: logits and a buffer.
Out: streamed text, tool calls and structured answers.
"""
