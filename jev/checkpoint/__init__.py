"""Exports on disk: reading, checking and imitating them."""
