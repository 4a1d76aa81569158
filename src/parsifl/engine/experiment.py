"""A run described by plain values, for the command line, sweeps and recipes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

import torch

from parsifl import data
from parsifl.core import config, registry
from parsifl.core.algorithm import AnyAlgorithm
from parsifl.core.errors import ConfigError, DataError, unknown
from parsifl.core.keys import Key
from parsifl.core.problem import Problem, flatten_inputs
from parsifl.data.clients import ClientData
from parsifl.engine.callbacks import DistanceToTruth
from parsifl.engine.run import Run
from parsifl.engine.settings import Evaluation, ExperimentSettings, NetworkModel
from parsifl.engine.simulate import simulate
from parsifl.engine.training import Callback, RoundEnd
from parsifl.linear.glm import GLM
from parsifl.linear.glm import NAME as COEFFICIENTS
from parsifl.nn import models
from parsifl.nn.neural import NeuralProblem

_Numbers = tuple[float, ...]
_NESTED: dict[str, type[Any]] = {"evaluation": Evaluation, "network": NetworkModel}


@final
@dataclass(frozen=True)
class Experiment(ExperimentSettings):
    """One run, described by plain values; `ExperimentSettings` declares them."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Experiment:
        """Build an experiment from plain values, such as those of a TOML file."""
        settings = dict(values)
        for name, kind in _NESTED.items():
            if isinstance(settings.get(name), Mapping):
                settings[name] = config.build(kind, settings[name])
        config.check_names(cls, settings)
        if "algorithm" not in settings:
            raise ConfigError("no algorithm given; `parsifl list algorithms` shows all")
        return config.build(cls, settings)

    def vary(self, values: Mapping[str, Any]) -> Experiment:
        """Return this experiment with other values of a grid.

        A name is a setting of the run or, if the run has none of this name, of the algorithm.
        """
        current = {each.name: getattr(self, each.name) for each in fields(self)}
        of_run = {name: value for name, value in values.items() if name in current}
        others = {name: value for name, value in values.items() if name not in current}
        config.check_names(registry.find(self.algorithm), others, current)
        current["settings"] = {**self.settings, **others}
        return config.build(type(self), {**current, **of_run})

    def build_algorithm(self) -> AnyAlgorithm:
        """Return the configured algorithm with the changes that the run describes."""
        return self.compose(registry.get(self.algorithm, **self.settings))

    def load(self, data_dir: str | Path | None = None) -> ClientData:
        """Return the data of the clients."""
        prepared = data.prepare(
            self.data,
            clients=self.clients,
            partition=self.partition,
            seed=self.seed,
            data_dir=data_dir,
            test=self.test,
            validation=self.validation,
        )
        return replace(prepared, profiles=profiles(self.profiles, len(prepared)))

    def run(
        self,
        run_dir: str | Path | None = None,
        *,
        resume: bool = False,
        data_dir: str | Path | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Run:
        """Run it in this process."""
        method, clients = self.build_algorithm(), self.load(data_dir)
        unchanged = dict.fromkeys(self.changes())  # the algorithm has the changes already
        problem = problem_for(self.model, clients)
        return simulate(
            method,
            problem,
            clients.flattened() if flatten_inputs(problem) else clients,
            run_dir=run_dir,
            resume=resume,
            callbacks=[*_distances(problem, clients), *callbacks],
            **{**self.run_settings().to_arguments(), **unchanged},
        )


def _distances(problem: Problem, clients: ClientData) -> list[Callback]:
    """Return the callback that records the distance to the coefficients, if these are known."""
    if clients.truth is None:
        return []
    truth = torch.as_tensor(clients.truth)
    start = problem.init(Key(0))
    if set(start) != {COEFFICIENTS} or start[COEFFICIENTS].shape != truth.shape:
        return []  # a network, or an intercept that the truth does not have
    known = DistanceToTruth({COEFFICIENTS: truth})

    def distance(event: RoundEnd) -> Mapping[str, float] | None:
        has_model = event.algorithm.model(event.problem, event.server) is not None
        return known(event) if has_model else None

    return [distance]


def _profile_entries(
    *,
    budget: _Numbers = (),
    epochs: _Numbers = (),
    flops_per_second: _Numbers = (),
    local_steps: _Numbers = (),
    width: _Numbers = (),
) -> None:
    """Declare the entries of a device profile; the algorithm decides which of them it reads."""


def profiles(text: str, count: int) -> tuple[dict[str, Any], ...]:
    """Return the profile of each of `count` devices.

    >>> profiles("budget=0.125+1", 4)
    ({'budget': 0.125}, {'budget': 0.125}, {'budget': 1}, {'budget': 1})
    """
    try:
        _, entries = config.parse(f"profiles:{text}")
    except ConfigError:
        raise ConfigError(
            f"cannot read the device profiles '{text}'; write entry=value,..., e.g. "
            "budget=0.125+1,epochs=2+4"
        ) from None
    groups = {
        # whole numbers are written without a point, as in a profile from Python
        name: [int(value) if value.is_integer() else value for value in values]
        for name, values in config.bind("the device profiles", _profile_entries, entries).items()
    }
    return tuple(
        {name: group[len(group) * device // count] for name, group in groups.items()}
        for device in range(count)
    )


class DataForm(Protocol):
    """The properties of the data that determine a model."""

    @property
    def name(self) -> str:
        """The name of the dataset."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row of features."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype of the features, such as "float32"."""
        ...

    @property
    def classes(self) -> int | None:
        """The number of classes; None for a real target."""
        ...

    @property
    def sparse(self) -> bool:
        """Whether the features are a CSR matrix."""
        ...


@dataclass(frozen=True)
class _Form:
    name: str
    shape: tuple[int, ...]
    dtype: str
    classes: int | None
    sparse: bool


def _form(clients: ClientData) -> DataForm:
    dtype = str(clients.x.dtype).removeprefix("torch.")
    shape = tuple(int(size) for size in clients.x.shape[1:])
    sparse = not isinstance(clients.x, torch.Tensor)
    return _Form(clients.name, shape, dtype, clients.classes, sparse)


def problem_for(model: str, data: ClientData | DataForm) -> Problem:
    """Return the problem for a model name and data of this form."""
    form = _form(data) if isinstance(data, ClientData) else data
    name, options = config.parse(model)
    if name == "auto":
        name = _automatic(form)
    if name == "glm":
        return _linear(form, options)
    if name not in models.names():
        raise ConfigError(unknown("model", name, ["auto", "glm", *models.names()]))
    if form.classes is None:
        raise DataError(f"'{form.name}' has a real target: use --model glm")
    if form.sparse:
        raise DataError(f"'{form.name}' is sparse: use --model glm")
    inputs = math.prod(form.shape) if name == "mlp" else form.shape[0]
    factory = partial(_build, name, {"inputs": inputs, "classes": form.classes, **options})
    return NeuralProblem(factory, dtype=getattr(torch, form.dtype))


def _build(name: str, options: dict[str, Any], width: float = 1.0) -> torch.nn.Module:
    return models.build(name, **{"width": width, **options})


def _automatic(form: DataForm) -> str:
    if form.classes is None or form.sparse or form.dtype == "float64":
        return "glm"
    colour = len(form.shape) == 3 and form.shape[0] == 3 and form.shape[1] >= 32
    return "vgg" if colour else "mlp"


def _linear(form: DataForm, options: Mapping[str, Any]) -> Problem:
    classes = form.classes
    datafit = "squared" if classes is None else "logistic" if classes == 2 else "softmax"
    fitting = {
        "features": math.prod(form.shape),
        "datafit": datafit,
        "classes": classes,
        "dtype": torch.float64 if form.dtype == "float64" else torch.float32,
    }
    return config.build(GLM, {**fitting, **options})
