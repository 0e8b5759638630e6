"""Calibration data and the inputs of every decoder block: what the compressor feeds to the model."""
