"""What "sparse" means: few coordinates, few groups of them, or few atoms of a dictionary."""
