"""Offline: from text to stored keys and values."""
