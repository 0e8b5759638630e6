"""What is known about model architectures: meta skeletons, where the blocks are, how checkpoint names map, fused groups."""
