"""Settings of the whole suite."""

import torch

# Tiny models are slower on several threads than on one, and parallel test runs would fight over the cores.
torch.set_num_threads(1)
