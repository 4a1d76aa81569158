"""For authors of new algorithms: conformance checks, hypothesis strategies, slow references."""
