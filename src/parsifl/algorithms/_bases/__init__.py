"""Base classes of algorithms, one per family."""
