"""The loop, written once: rounds, executors, client state, evaluation, run folders."""
