"""Whether a method may be relied on for a model: a verdict beforehand, a shadow while it serves."""
