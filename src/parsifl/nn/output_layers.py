"""Find the layers that produce the output of a module, by symbolic tracing."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, final

from torch import fx, nn

from parsifl.nn.functional import GATE

_MOST_DECISIONS = 200  # a loop that waits for a value would never terminate


def output_layers(module: nn.Module) -> tuple[str, ...] | None:
    """Return the layers with weights nearest to the output; None if tracing fails.

    If `forward` branches on a value, both branches are traced and the layers of both returned.

    >>> output_layers(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.Softmax(-1)))
    ('2',)
    """
    first = _Tracer(answer=True)
    names = _nearest(module, first)
    if first.decisions:
        names |= _nearest(module, _Tracer(answer=False))
    return tuple(sorted(names)) or None


@final
class _Stand(fx.Proxy):
    """A proxy that can also be counted and indexed with, because sizes do not matter here."""

    def __len__(self) -> int:
        return 1

    def __index__(self) -> int:
        return 1

    __int__ = __index__

    def __float__(self) -> float:
        return 1.0


@final
class _Tracer(fx.Tracer):
    """Traces a forward pass with one fixed answer to every test of a value."""

    def __init__(self, *, answer: bool) -> None:
        super().__init__()
        self.answer, self.decisions = answer, 0

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return a proxy for the result of a step."""
        return _Stand(node, self)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Trace a submodule; calls of other threads are not traced."""
        if all(m is not layer for layer in self.root.modules()):
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Answer a test of a value."""
        del obj
        self.decisions += 1
        if self.decisions > _MOST_DECISIONS:
            raise fx.proxy.TraceError("too many decisions")
        return self.answer


def _nearest(module: nn.Module, tracer: _Tracer) -> set[str]:
    # a forward pass may set attributes of its module: use a copy that shares the tensors
    shared = {id(one): one for one in itertools.chain(module.parameters(), module.buffers())}
    try:
        with GATE.tracing(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nodes = tracer.trace(copy.deepcopy(module, shared)).nodes
    except Exception:  # a forward pass may fail on a proxy in any way: it cannot be traced then
        return set()
    named = module.named_parameters(remove_duplicate=False)
    heavy = [name for name, parameter in named if parameter.ndim > 1]
    names: set[str] = set()
    seen: set[fx.Node] = set()
    waiting = list(reversed(nodes))[:1]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if owners := _owners(node, heavy):
            names.update(owners)
        else:
            waiting += node.all_input_nodes
    return names


def _owners(node: Any, heavy: Sequence[str]) -> list[str]:
    """Return the modules whose weights a step uses."""
    if node.op == "call_module":
        inside = f"{node.target}."
        return [str(node.target)] if any(name.startswith(inside) for name in heavy) else []
    used = [str(one.target) for one in node.all_input_nodes if one.op == "get_attr"]
    return [name.rpartition(".")[0] for name in used if name in heavy]
