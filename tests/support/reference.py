"""A slow, simple federated run in NumPy float64, with handwritten gradients.

It uses no code of the engine, the solvers or the algorithms except the keyed mini-batches, so that
both sides read the same rows. ``python -m tests.support.reference FOLDER`` writes the golden
trajectories that the engine is compared with, as hexadecimal floats.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parsifl.core.batching import BatchSpec, schedule
from parsifl.core.keys import Key

Array = npt.NDArray[np.float64]
Params = dict[str, Array]
Gradient = Callable[[Params, Array, npt.NDArray[np.int64]], Params]
Steps = Sequence[Sequence[int]]
"""The row numbers of each mini-batch."""
ROUNDS = 5


# ---------------------------------------------------------------------- models
def softmax_gradient(params: Params, x: Array, y: npt.NDArray[np.int64]) -> Params:
    """Gradient of the mean cross-entropy of softmax(x W^T + b): (p - e_y) x^T / n."""
    error = _softmax_error(x @ params["weight"].T + params["bias"], y)
    return {"weight": error.T @ x, "bias": error.sum(axis=0)}


def mlp_gradient(params: Params, x: Array, y: npt.NDArray[np.int64]) -> Params:
    """Gradient of the mean cross-entropy of softmax(W2 relu(W1 x + b1) + b2), layer by layer."""
    before = x @ params["0.weight"].T + params["0.bias"]
    hidden = np.maximum(before, 0.0)
    error = _softmax_error(hidden @ params["2.weight"].T + params["2.bias"], y)
    back = (error @ params["2.weight"]) * (before > 0.0)
    return {
        "0.weight": back.T @ x,
        "0.bias": back.sum(axis=0),
        "2.weight": error.T @ hidden,
        "2.bias": error.sum(axis=0),
    }


def _softmax_error(logits: Array, y: npt.NDArray[np.int64]) -> Array:
    likely = np.exp(logits - logits.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    likely[np.arange(len(y)), y] -= 1.0
    return np.asarray(likely / len(y))


GRADIENTS: dict[str, Gradient] = {"softmax": softmax_gradient, "mlp": mlp_gradient}


# ---------------------------------------------------------------------- one run
@dataclass(frozen=True)
class Setting:
    """A tiny federation: which client has which rows, and how clients train."""

    model: str
    initial: Params
    x: Array
    y: npt.NDArray[np.int64]
    train: Sequence[Sequence[int]]
    profiles: Sequence[Mapping[str, int]]
    settings: Mapping[str, Any]
    participation: float = 1.0
    seed: int = 0

    def cohort(self, round: int) -> list[int]:
        """Draw the clients of a round."""
        count = len(self.train)
        size = max(1, int(count * self.participation + 0.5))
        if size == count:
            return list(range(count))
        generator = Key(self.seed, round, purpose="cohort").numpy_generator()
        drawn = generator.choice(count, size, replace=False, shuffle=False)
        return sorted(int(client) for client in drawn)

    def batches(self, round: int, client: int, name: str) -> list[list[int]]:
        """Draw the mini-batches of a client; a short batch is short, not padded."""
        rows = np.array(self.train[client])
        steps = self.profiles[client].get("local_steps", self.settings["local_steps"])
        key = Key(self.seed, round, client, f"batches/{name}")
        draw = BatchSpec(self.settings["batch_size"], steps=steps)
        (index,), valid = schedule(len(rows), draw, [key.numpy_generator()])
        return [rows[i[v]].tolist() for i, v in zip(index, valid, strict=True)]


@dataclass
class State:
    """What server and clients keep; names as in the engine's states."""

    server: dict[str, Params] = field(default_factory=dict)
    clients: dict[int, Params] = field(default_factory=dict)
    cohort: list[int] = field(default_factory=list)
    batches: dict[int, dict[str, list[list[int]]]] = field(default_factory=dict)


Extra = Callable[[str, Array], Array]


def descend(setting: Setting, params: Params, steps: Steps, extra: Extra) -> Params:
    """Take w <- w - eta v with v <- m v + g + decay w + extra(w), one step for each batch."""
    eta, m = setting.settings["lr"], setting.settings.get("momentum", 0.0)
    decay = setting.settings.get("weight_decay", 0.0)
    moved = {name: value.copy() for name, value in params.items()}
    velocity = {name: np.zeros_like(value) for name, value in params.items()}
    for rows in steps:
        gradient = GRADIENTS[setting.model](moved, setting.x[rows], setting.y[rows])
        for name, w in moved.items():
            push = gradient[name] + decay * w + extra(name, w)
            velocity[name] = m * velocity[name] + push
            moved[name] = w - eta * velocity[name]
    return moved


def mean(parts: Sequence[tuple[float, Params]]) -> Params:
    """Return the weighted mean."""
    total = sum(weight for weight, _ in parts)
    sums = {n: np.sum([weight * part[n] for weight, part in parts], axis=0) for n in parts[0][1]}
    return {name: value / total for name, value in sums.items()}


def pull(strength: float, centre: Params) -> Extra:
    """Return strength * (w - centre), the gradient of a proximal term."""
    return lambda name, w: strength * (w - centre[name])


def fedavg_round(setting: Setting, state: State, round: int) -> None:
    """Train from w, then w <- sum p_i w_i with p_i proportional to the training rows."""
    _averaged(setting, state, round, "train", 0.0)


def fedprox_round(setting: Setting, state: State, round: int) -> None:
    """Train on g + mu (w_i - w), then average."""
    _averaged(setting, state, round, "train", setting.settings["mu"])


def ditto_round(setting: Setting, state: State, round: int) -> None:
    """Train w as FedAvg does, and v_i on g + lambda (v_i - w) with the w of this round's start."""
    received, lam = state.server[""], setting.settings["lam"]
    for client in state.cohort:
        personal = state.clients.get(client, received)
        steps = _drawn(setting, state, round, client, "personal")
        state.clients[client] = descend(setting, personal, steps, pull(lam, received))
    _averaged(setting, state, round, "shared", 0.0)


def local_round(setting: Setting, state: State, round: int) -> None:
    """Train v_i on the client's own rows; nothing is shared."""
    for client in state.cohort:
        steps = _drawn(setting, state, round, client, "train")
        personal = state.clients.get(client, setting.initial)
        state.clients[client] = descend(setting, personal, steps, pull(0.0, personal))


def scaffold_round(setting: Setting, state: State, round: int) -> None:
    """Train on g - c_i + c; c_i+ = c_i - c + (w - w_i) / (K eta); server steps of size eta_g."""
    w, c = state.server["params"], state.server["control"]
    eta, eta_g = setting.settings["lr"], setting.settings["server_lr"]
    moves: list[tuple[float, Params]] = []
    changes: list[tuple[float, Params]] = []
    for client in state.cohort:
        steps = _drawn(setting, state, round, client, "train")
        own = state.clients.get(client, {name: np.zeros_like(v) for name, v in w.items()})
        drift: Extra = lambda name, _, own=own: c[name] - own[name]  # type: ignore[misc]  # noqa: E731
        trained = descend(setting, w, steps, drift)
        fresh = {n: own[n] - c[n] + (w[n] - trained[n]) / (len(steps) * eta) for n in w}
        moves.append((1.0, {n: trained[n] - w[n] for n in w}))
        changes.append((1.0, {n: fresh[n] - own[n] for n in w}))
        state.clients[client] = fresh
    share = len(state.cohort) / len(setting.train)
    move, change = mean(moves), mean(changes)
    state.server["params"] = {n: w[n] + eta_g * move[n] for n in w}
    state.server["control"] = {n: c[n] + share * change[n] for n in w}


def _averaged(setting: Setting, state: State, round: int, draw: str, mu: float) -> None:
    received = state.server[""]
    parts = []
    for client in state.cohort:
        steps = _drawn(setting, state, round, client, draw)
        trained = descend(setting, received, steps, pull(mu, received))
        parts.append((float(len(setting.train[client])), trained))
    state.server[""] = mean(parts)


def _drawn(setting: Setting, state: State, round: int, client: int, name: str) -> list[list[int]]:
    steps = setting.batches(round, client, name)
    state.batches.setdefault(client, {})[name] = steps
    return steps


ROUND: dict[str, Callable[[Setting, State, int], None]] = {
    "fedavg": fedavg_round,
    "fedprox": fedprox_round,
    "scaffold": scaffold_round,
    "ditto": ditto_round,
    "local": local_round,
}


def run(algorithm: str, setting: Setting, rounds: int = ROUNDS) -> list[State]:
    """Return the state after every round."""
    zeros = {name: np.zeros_like(value) for name, value in setting.initial.items()}
    starts: dict[str, dict[str, Params]] = {
        "scaffold": {"params": setting.initial, "control": zeros},
        "local": {},
    }
    state = State(starts.get(algorithm, {"": setting.initial}))
    trajectory = []
    for round in range(rounds):
        state = State(dict(state.server), dict(state.clients), setting.cohort(round))
        ROUND[algorithm](setting, state, round)
        trajectory.append(state)
    return trajectory


# ---------------------------------------------------------------------- golden files
FEATURES, CLASSES, HIDDEN = 4, 3, 5
_COMMON: dict[str, Any] = {"lr": 0.2, "local_steps": 4, "batch_size": 3}
_OWN: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.3},
    "scaffold": {"server_lr": 0.7},
    "ditto": {"lam": 0.4},
    "local": {},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "mlp": ("mlp", {}),
    "mlp-momentum": ("mlp", {"momentum": 0.9, "weight_decay": 0.01, "lr": 0.05}),
}


def golden_setting(algorithm: str, case: str) -> Setting:
    """Return the tiny federation of a golden file: four clients, one of them slow."""
    model, changes = CASES[case]
    generator = np.random.default_rng(20)
    x = generator.normal(size=(23, FEATURES))
    y = generator.integers(0, CLASSES, size=23)
    bounds = [0, 5, 12, 20, 23]
    shapes: dict[str, tuple[int, ...]] = {
        "softmax": {"weight": (CLASSES, FEATURES), "bias": (CLASSES,)},
        "mlp": {
            "0.weight": (HIDDEN, FEATURES),
            "0.bias": (HIDDEN,),
            "2.weight": (CLASSES, HIDDEN),
            "2.bias": (CLASSES,),
        },
    }[model]
    return Setting(
        model=model,
        initial={name: 0.5 * generator.normal(size=shape) for name, shape in shapes.items()},
        x=x,
        y=y,
        train=[list(range(a, b)) for a, b in itertools.pairwise(bounds)],
        profiles=[{}, {"local_steps": 2}, {}, {}],
        settings={**_COMMON, **_OWN[algorithm], **changes},
        participation=0.75,
        seed=11,
    )


def golden(algorithm: str) -> dict[str, Any]:
    """Return the contents of a golden file."""
    cases: dict[str, Any] = {}
    for case in CASES:
        setting = golden_setting(algorithm, case)
        cases[case] = {
            "model": setting.model,
            "settings": dict(setting.settings),
            "participation": setting.participation,
            "seed": setting.seed,
            "profiles": [dict(profile) for profile in setting.profiles],
            "train": [list(rows) for rows in setting.train],
            "x": to_hex(setting.x),
            "y": setting.y.tolist(),
            "initial": {name: to_hex(value) for name, value in setting.initial.items()},
            "rounds": [_state_json(state) for state in run(algorithm, setting)],
        }
    return {"algorithm": algorithm, "cases": cases}


def _state_json(state: State) -> dict[str, Any]:
    parts = state.server.items()
    server = {f"{p}.{n}".removeprefix("."): to_hex(v) for p, tree in parts for n, v in tree.items()}
    clients = {
        str(client): {name: to_hex(value) for name, value in kept.items()}
        for client, kept in sorted(state.clients.items())
    }
    batches = {str(client): drawn for client, drawn in state.batches.items()}
    return {"cohort": state.cohort, "batches": batches, "server": server, "clients": clients}


def to_hex(values: Any) -> Any:
    """Convert an array to nested lists of hexadecimal floats, without loss."""
    return float(values).hex() if np.ndim(values) == 0 else [to_hex(item) for item in values]


def from_hex(values: Any) -> Array:
    """Undo `to_hex`.

    >>> from_hex(to_hex(np.array([0.1, 0.2]))).tolist()
    [0.1, 0.2]
    """
    return np.array(_floats(values))


def _floats(values: Any) -> Any:
    return float.fromhex(values) if isinstance(values, str) else [_floats(v) for v in values]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the golden files into a folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.reference")
    parser.add_argument("folder", nargs="?", default="tests/golden", help="output directory")
    folder = Path(parser.parse_args(arguments).folder)
    folder.mkdir(parents=True, exist_ok=True)
    for algorithm in ROUND:
        text = json.dumps(golden(algorithm), indent=None, separators=(",", ":"))
        (folder / f"{algorithm}.json").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
