"""What everything else rests on: the contract, problems, trees, keys, settings, errors."""
