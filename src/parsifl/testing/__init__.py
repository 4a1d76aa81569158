"""For authors of new methods: conformance checks, hypothesis strategies, slow references."""
