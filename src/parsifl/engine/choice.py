"""Which executor runs the clients: a deterministic rule, so that a run repeats bit for bit."""

from __future__ import annotations

from parsifl.core.errors import ConfigError, unknown
from parsifl.core.problem import ExecutionHints, Problem, execution, layer_chain
from parsifl.engine.executors import Executor

BLOCK = ExecutionHints().block_size
EXECUTORS = ("auto", "loop", "threads", "vmap", "fused")


def choose_executor(
    executor: str, problem: Problem, *, sparse: bool = False, cpu: bool = True
) -> tuple[Executor, int]:
    """Return the executor and the number of clients per block; `sparse` rows are CSR."""
    if executor not in EXECUTORS:
        raise ConfigError(unknown("executor", executor, EXECUTORS))
    if not cpu:
        if executor in ("threads", "fused"):
            raise ConfigError(
                f"executor={executor!r} is made for the CPU: use 'vmap' or 'loop' on other devices"
            )
        executor = "vmap" if executor == "auto" else executor
    # Sparse rows make no batch. Clients in threads would take twice as long as one after the other,
    # since each of their many short products hands over Python's lock (docs/adr/0004).
    if executor == "loop" or not problem.supports_vmap or sparse:
        return "loop", BLOCK
    hints = execution(problem)
    if executor == "threads" or (executor == "auto" and hints.per_client_threads):
        return "threads", BLOCK
    fused = executor != "vmap" and hints.fused and layer_chain(problem) is not None
    return "fused" if fused else "vmap", hints.block_size
