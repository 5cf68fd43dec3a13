"""The device and what runs on it: memory, uploads, launches, graphs, compiled code kept on disk, tensor maps."""
