"""One file per family of datasets; every module here is discovered by the registry."""
