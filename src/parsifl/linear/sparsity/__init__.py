"""Sparsity in coordinates, in groups of coordinates, or in atoms of a dictionary."""
