"""How fast fusing is, beside transformers' own prefill and beside what the machine could do at most."""
