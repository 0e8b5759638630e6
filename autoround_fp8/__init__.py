"""AutoRound-style calibration and export of static W8A8-FP8 checkpoints."""

__version__ = "0.1.0"
