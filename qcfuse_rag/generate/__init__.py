"""From the first token's logits to the answer."""
