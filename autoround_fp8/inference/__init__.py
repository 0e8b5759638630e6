"""From a checkpoint folder to a model that runs. Meets the compressor on disk only."""
