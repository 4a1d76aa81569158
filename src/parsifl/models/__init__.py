"""Plain modules, ready for any problem."""
