"""How a weight becomes codes and scales: one function per algorithm."""
