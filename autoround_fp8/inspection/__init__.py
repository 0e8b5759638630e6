"""What a finished checkpoint holds, whether it is sound, and who can load it; the tensors themselves say, no model."""
