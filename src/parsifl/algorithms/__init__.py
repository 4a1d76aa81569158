"""One file a method; every final class in here is registered by its lower-case name."""
