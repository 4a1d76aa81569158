"""Local problems with a dual variable, and the mean of the duals on the server."""

from __future__ import annotations

from parsifl.algorithms._bases.averaging import Mean
from parsifl.core import tree
from parsifl.core.batching import Batches
from parsifl.core.problem import Params, Problem, split_buffers
from parsifl.solvers.sgd import SgdConfig, sgd
from parsifl.solvers.update_rules import LinearRule


def solve(
    problem: Problem,
    received: Params,
    dual: Params,
    batches: Batches,
    config: SgdConfig,
    alpha: float,
) -> tuple[Params, Params]:
    r"""Minimize f_i(w) - <gamma_i, w> + (alpha/2) |w - w_t|^2 by SGD.

    Returns w_i and the new dual:

    .. math:: \gamma_i \leftarrow \gamma_i + \alpha (w_t - w_i)
    """
    start, _ = split_buffers(problem, received)
    linear = tree.map(lambda w, gamma: -alpha * w - gamma, start, dual)
    trained = sgd(problem, received, batches, config, rule=LinearRule(alpha), aux=(linear,))
    end, _ = split_buffers(problem, trained)
    return trained, tree.map(lambda g, w, v: g + alpha * (w - v), dual, start, end)


def server_step(
    received: Params, dual: Params, total: Mean, clients: int, alpha: float
) -> tuple[Params, Params]:
    r"""Return the point before any proximal step, and the mean of all gamma_i.

    Only the mean over all N clients is kept (Algorithm 3 of FedSLR); those that did not arrive
    keep their gamma_i, so dividing by N is exact under partial participation too. Leaves without a
    dual (buffers) are averaged.

    .. math:: \bar\gamma \leftarrow \bar\gamma + \tfrac{\alpha}{N} \textstyle\sum_{i \in S}
              (w_t - w_i), \qquad v = \tfrac{1}{|S|} \textstyle\sum_{i \in S} w_i
              - \tfrac{1}{\alpha} \bar\gamma
    """
    mean = total.value()
    moved = {
        name: dual[name] + (alpha / clients) * total.weight[name] * (received[name] - value)
        for name, value in mean.items()
        if name in dual
    }
    point = {n: value - moved[n] / alpha if n in moved else value for n, value in mean.items()}
    return point, moved
