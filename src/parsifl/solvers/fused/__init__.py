"""Training steps for a block of clients without autograd: the fast path of `solvers.sgd`.

For a chain of layers the gradient of a weight need not be stored: `baddbmm_` adds -lr * g^T h to
the weights of all clients at once. Rules apply before and after, as in the generic path, which is
the reference.
"""

from parsifl.solvers.fused.maml import MamlSteps
from parsifl.solvers.fused.steps import Steps
from parsifl.solvers.fused.vmap_bridge import fused_steps, gradient, network_for, run, run_maml

__all__ = ["MamlSteps", "Steps", "fused_steps", "gradient", "network_for", "run", "run_maml"]
