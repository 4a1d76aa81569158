"""Tools for authors of algorithms: conformance checks, hypothesis strategies, references."""
