"""What an export is worth: comparison with its original, and lm-eval tasks."""
