"""What computes an FP8 linear: the float32 oracle and faster equals, chosen by a table that gives reasons."""
