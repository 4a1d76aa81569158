"""The foundation: the contract, problems, trees, keys, settings and errors."""
