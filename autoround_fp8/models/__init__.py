"""What is known of architectures: meta skeletons, where the blocks are, how checkpoint names map, fused groups."""
