"""Checkpoint formats, one file each, both directions: tensors on disk and the block in config.json."""
