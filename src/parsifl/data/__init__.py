"""Data sets, synthetic generators, partitions and client shards."""
