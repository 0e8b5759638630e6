"""Checkpoints on disk: reading headers and tensors, writing shards, filling meta modules. Knows no model or format."""
