"""Making an export from a base model and a LoRA checkpoint."""
