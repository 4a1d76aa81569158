"""Shared behaviour of algorithms: one base per family, one class deep."""
