"""Pure functions on tensors: scales, FP8 codes, error measures. No modules, no policy, no state."""
