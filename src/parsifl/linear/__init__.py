"""Generalized linear models, dense or CSR, and sparsity constraints."""
