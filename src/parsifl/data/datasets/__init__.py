"""One file a family of data sets; every module here is discovered by the registry."""
