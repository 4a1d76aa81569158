"""Which executor runs the clients: a deterministic rule, so that a run repeats bit for bit."""

from __future__ import annotations

from parsifl.core.errors import ConfigError, unknown
from parsifl.core.problem import ExecutionHints, Problem, execution, layer_chain
from parsifl.engine.executors import Executor

BLOCK = ExecutionHints().block_size
ENGINES = ("auto", "sequential", "batched")


def choose_executor(engine: str, problem: Problem, *, sparse: bool = False) -> tuple[Executor, int]:
    """Return the executor and the clients per block; `sparse` says that the rows are CSR."""
    if engine not in ENGINES:
        raise ConfigError(unknown("engine", engine, ENGINES))
    # Sparse rows make no batch. Clients in threads would take twice as long as one after the other,
    # since each of their many short products hands over Python's lock (docs/adr/0004).
    if engine == "sequential" or not problem.supports_vmap or sparse:
        return "loop", BLOCK
    hints = execution(problem)
    if engine == "auto" and hints.per_client_threads:
        return "threads", BLOCK
    fused = hints.fused and layer_chain(problem) is not None
    return "fused" if fused else "vmap", hints.block_size
