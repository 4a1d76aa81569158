"""Solvers as pure functions, written for one client and run for many at once."""
