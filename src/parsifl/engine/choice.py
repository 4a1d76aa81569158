"""Which executor runs the clients: a deterministic rule, so that a run repeats bit for bit."""

from __future__ import annotations

from torch import nn

from parsifl.core.errors import ConfigError, unknown
from parsifl.core.problem import Problem, SupportSolvable
from parsifl.engine.executors import Executor
from parsifl.nn.neural import NeuralProblem

BLOCK = 10  # clients a batch: larger blocks fall out of the cache and are slower
DENSE_BLOCK = 20  # of fused perceptrons: threads hand Python's lock over less often (docs/adr/0004)
LINEAR_BLOCK = 64  # a linear model is small: its blocks are limited by calls, not by the cache
FUSED_CONVOLUTIONS = 2  # most of them in a chain that is faster fused than alone (docs/adr/0003)
EXECUTORS = ("auto", "loop", "threads", "vmap", "fused")


def choose_executor(
    executor: str, problem: Problem, *, sparse: bool = False
) -> tuple[Executor, int]:
    """Return the executor and the number of clients per block; `sparse` rows are CSR."""
    if executor not in EXECUTORS:
        raise ConfigError(unknown("executor", executor, EXECUTORS))
    # sparse rows make no batch; clients in threads would take twice as long as one after the other,
    # since each of their many short products hands Python's lock over (docs/adr/0004)
    if executor == "loop" or not problem.supports_vmap or sparse:
        return "loop", BLOCK
    fusible = isinstance(problem, NeuralProblem) and problem.chain is not None
    # deep convolutions are no faster in batches than alone; clients that have a core each do not
    # wait for each other, as the threads of one product would where they share a busy core
    most = FUSED_CONVOLUTIONS if fusible else 0
    # of an LSTM, torch knows no batch: vmap does one after the other, on one core
    if executor == "threads" or (
        executor == "auto" and (convolutions(problem) > most or _count(problem, nn.LSTM))
    ):
        return "threads", BLOCK
    if fusible and executor != "vmap":
        return "fused", BLOCK if convolutions(problem) else DENSE_BLOCK
    return "vmap", LINEAR_BLOCK if isinstance(problem, SupportSolvable) else BLOCK


def convolutions(problem: Problem) -> int:
    """Return the number of convolutions."""
    return _count(problem, nn.modules.conv._ConvNd)


def _count(problem: Problem, kind: type[nn.Module]) -> int:
    if not isinstance(problem, NeuralProblem):
        return 0
    return sum(isinstance(layer, kind) for layer in problem.module.modules())
