"""Local problems with a dual variable, and the mean of the duals on the server.

Clients upload the change of the model, and both sides update their duals by it. The duals therefore
agree even if a lossy wire rounds the change.
"""

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

    Returns the upload (the change w_i - w_t, and the buffers themselves) and the new dual:

    .. math:: \gamma_i \leftarrow \gamma_i + \alpha (w_t - w_i)
    """
    start, _ = split_buffers(problem, received)
    linear = tree.map(lambda w, gamma: -alpha * w - gamma, start, dual)
    trained = sgd(problem, received, batches, config, rule=LinearRule(alpha), aux=(linear,))
    end, buffers = split_buffers(problem, trained)
    change = tree.subtract(end, start)
    return {**change, **buffers}, tree.axpy(-alpha, change, dual)


def acknowledged(dual: Params, upload: Params, arrived: Params, alpha: float) -> Params:
    """Return a client's dual, updated by the change that arrived instead of the one uploaded."""
    return {n: gamma + alpha * (upload[n] - arrived[n]) for n, gamma in dual.items()}


def server_step(
    params: Params, dual: Params, total: Mean, clients: int, alpha: float
) -> tuple[Params, Params]:
    r"""Return the point to which a proximal step may be applied, and the mean of all gamma_i.

    Only the mean over all N clients is kept (Algorithm 3 of FedSLR). Clients whose upload did not
    arrive keep their gamma_i, so dividing by N is exact under partial participation too. Leaves
    without a dual (buffers) are averaged.

    .. math:: \bar\gamma \leftarrow \bar\gamma + \tfrac{\alpha}{N} \textstyle\sum_{i \in S}
              (w_t - w_i), \qquad v = \tfrac{1}{|S|} \textstyle\sum_{i \in S} w_i
              - \tfrac{1}{\alpha} \bar\gamma
    """
    mean = total.value()
    moved = {
        name: dual[name] - (alpha / clients) * total.weight[name] * change
        for name, change in mean.items()
        if name in dual
    }
    point = {
        name: params[name] + value - moved[name] / alpha if name in moved else value
        for name, value in mean.items()
    }
    return point, moved
