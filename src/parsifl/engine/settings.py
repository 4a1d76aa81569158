"""The settings of a run, each declared once: its range, its default and its description.

`simulate`, `Experiment`, the options of the command line, TOML files, grids and the configuration
of a Flower app read these declarations. To add a setting of a run, add a field to `RunSettings` and
its type to `RunOptions`, and use it.

Importing this module does not import torch: the command line builds its options from it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import textwrap
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypedDict, TypeVar, final

from annotated_types import Ge, Le

from parsifl.core import config
from parsifl.core.config import (
    Count,
    Fraction,
    Help,
    Momentum,
    NonNegative,
    Participation,
    Positive,
    Precision,
    Size,
)
from parsifl.core.errors import ConfigError

if TYPE_CHECKING:
    from parsifl.core.algorithm import AnyAlgorithm

F = TypeVar("F", bound=Callable[..., Any])
Select = Literal["last", "best-validation", "best-test"]
Clients = Literal["all", "sampled", "unseen"]
Executors = Literal["auto", "loop", "threads", "vmap", "fused"]
Bytes = Annotated[int, Ge(0), Le(2**63 - 1)]
STATE_LIMIT = 2 << 30
WINDOW = 200


@final
@dataclass(frozen=True)
class Evaluation:
    """How models are evaluated.

    Parameters
    ----------
    fine_tune_steps, fine_tune_epochs
        SGD steps, or passes over its client's training rows, that every personal model takes
        before it is evaluated. They do not change the run. Set at most one of them.
    fine_tune_lr, fine_tune_batch_size, fine_tune_momentum, fine_tune_weight_decay
        Settings of the fine-tuning. fine_tune_lr=None uses the learning rate of the evaluated
        round.
    select
        Which round the headline number comes from: the last; the best on validation data; or the
        best on test data, as some papers do.
    clients
        Which clients are evaluated: all, those that have trained, or those held out of training.
    unseen
        The fraction of clients that is held out of training, for clients="unseen".
    weighting
        Whether the mean over clients is weighted by the rows of the split or uniform. It does not
        follow the algorithm's own `weighting`, which is about training; the report names both if
        they differ.
    train
        Whether models are also evaluated on the training rows, which takes extra time.
    """

    fine_tune_steps: Annotated[
        Size,
        Help(
            "Fine-tune personal models for this many SGD steps before evaluation.",
            option="--fine-tune-steps",
        ),
    ] = 0
    fine_tune_lr: Positive | None = 0.01
    fine_tune_batch_size: Count = 20
    fine_tune_momentum: Momentum = 0.0
    fine_tune_weight_decay: NonNegative = 0.0
    fine_tune_epochs: NonNegative = 0.0
    select: Annotated[Select, Help("Which round to report.", option="--select")] = "last"
    clients: Clients = "all"
    unseen: Fraction = 0.0
    weighting: Literal["samples", "uniform"] = "samples"
    train: Annotated[
        bool,
        Help(
            "Also evaluate on training rows; metrics.jsonl has the scores.",
            option="--train-scores",
        ),
    ] = False

    def __post_init__(self) -> None:
        config.check(self)
        if self.fine_tune_steps and self.fine_tune_epochs:
            raise ConfigError(
                "fine_tune_steps and fine_tune_epochs are mutually exclusive: got "
                f"fine_tune_steps={self.fine_tune_steps} and "
                f"fine_tune_epochs={self.fine_tune_epochs:g}. Remove one of them."
            )

    @property
    def fine_tunes(self) -> bool:
        """Whether personal models are fine-tuned before they are evaluated."""
        return bool(self.fine_tune_steps or self.fine_tune_epochs)


@final
@dataclass(frozen=True)
class NetworkModel:
    """A link between server and clients.

    Parameters
    ----------
    latency
        Seconds for a message to arrive, in each direction; 0 where nothing is sent.
    up, down
        Bytes per second; None means no limit.

    Examples
    --------
    >>> NetworkModel(latency=0.15, up=1e6).seconds(up=1_000_000, down=0, flops=None, profile={})
    1.15
    """

    latency: NonNegative = 0.0
    up: Positive | None = None
    down: Positive | None = None

    def __post_init__(self) -> None:
        config.check(self)

    def seconds(self, up: int, down: int, flops: int | None, profile: Any) -> float:
        """Return the seconds of one client's round, with computation if the device is known."""
        speed = profile.get("flops_per_second")
        computing = flops / speed if flops is not None and speed else 0.0
        sending = up / (self.up or math.inf) + down / (self.down or math.inf)
        messages = (up > 0) + (down > 0)
        return messages * self.latency + sending + computing


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run, apart from its algorithm, its problem and its data."""

    are_arguments: ClassVar[bool] = True

    rounds: Annotated[
        Count,
        Help(
            "Number of rounds in total. A resumed run continues until it has this many.",
        ),
    ] = 50
    seed: Annotated[Size, Help("Random seed; it determines all random numbers.")] = 0
    participation: Annotated[
        Participation, Help("Fraction of clients that take part in a round.")
    ] = 1.0
    executor: Annotated[
        Executors,
        Help(
            'How clients run: "loop" one by one, "threads" one per thread, "vmap" and "fused" '
            'many at once ("fused" has handwritten SGD steps for models that it supports). "auto" '
            "chooses the fastest."
        ),
    ] = "auto"
    device: Annotated[
        str,
        Help(
            "Where clients compute, such as cpu or cuda. Data and states stay in main memory and "
            "are moved to the device when needed."
        ),
    ] = "cpu"
    uploads: Annotated[
        str | None,
        Help(
            "How uploads are compressed, e.g. topk:fraction=0.01; see `parsifl list uploads`. "
            "Default: not at all.",
            option="--upload",
        ),
    ] = None
    aggregation: Annotated[
        str | None,
        Help(
            "A robust rule in place of the mean, e.g. median; see `parsifl list aggregations`. "
            "Default: the rule of the algorithm."
        ),
    ] = None
    server_optimizer: Annotated[
        str | None,
        Help(
            "Updates the server's parameters, e.g. adam:lr=0.05; see `parsifl list "
            "server-optimizers`. Default: the algorithm's own update."
        ),
    ] = None
    precision: Annotated[Precision, Help("Precision of values in messages.")] = "exact"
    evaluate_every: Annotated[
        Size,
        Help("Rounds between evaluations; the last round is always evaluated. 0: never."),
    ] = 1
    evaluation: Annotated[Evaluation, Help("How models are evaluated.")] = field(
        default_factory=Evaluation
    )
    network: Annotated[NetworkModel, Help("The simulated network.")] = field(
        default_factory=NetworkModel
    )
    patience: Annotated[
        Count,
        Help(
            "Stop with an error after this many consecutive rounds in which every client failed. "
            "If every client fails in the first round, the run stops at once. A deployment stops "
            "earlier, when its quorum is missed."
        ),
    ] = 3
    checkpoint_seconds: Annotated[
        NonNegative | None,
        Help(
            "Minimum time between two checkpoints. Default: 5 seconds, or after every round of a "
            "deployment."
        ),
    ] = None
    state_limit: Annotated[
        Bytes,
        Help(
            "Maximum bytes of client state in memory; the rest is stored in the run directory, or "
            "in a temporary one. Nodes of a deployment keep their state on disk."
        ),
    ] = STATE_LIMIT
    window: Annotated[Count, Help("How many clients of a simulation are prepared at a time.")] = (
        WINDOW
    )

    def __post_init__(self) -> None:
        config.check(self)

    def run_settings(self) -> RunSettings:
        """Return the settings of the run alone, without those of a subclass."""
        return RunSettings(
            **{each.name: getattr(self, each.name) for each in dataclasses.fields(RunSettings)}
        )

    def to_arguments(self) -> dict[str, Any]:
        """Return the settings as arguments of a function."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}

    def changes(self) -> dict[str, str | None]:
        """Return the changes to the algorithm, as `compose` takes them."""
        return {
            "uploads": self.uploads,
            "aggregation": self.aggregation,
            "server_optimizer": self.server_optimizer,
        }

    def compose(self, algorithm: AnyAlgorithm) -> AnyAlgorithm:
        """Return an algorithm with the changes that the run describes."""
        if all(text is None for text in self.changes().values()):
            return algorithm  # a node imports its algorithm and nothing else
        from parsifl.algorithms.composed import compose

        return compose(algorithm, **self.changes())

    def identity(self) -> dict[str, Any]:
        """Return the settings that change the results of every run, as JSON values."""
        return {
            "seed": self.seed,
            "participation": float(self.participation),
            "precision": self.precision,
            "evaluate_every": self.evaluate_every,
            "evaluation": config.to_json(self.evaluation),
            "network": config.to_json(self.network),
        }


class RunOptions(TypedDict, total=False):
    """The types of `RunSettings` without `rounds`, for type checkers and editors."""

    seed: int
    participation: float
    executor: Executors
    device: str
    uploads: str | None
    aggregation: str | None
    server_optimizer: str | None
    precision: Precision
    evaluate_every: int
    evaluation: Evaluation
    network: NetworkModel
    patience: int
    checkpoint_seconds: float | None
    state_limit: int
    window: int


@dataclass(frozen=True)
class ExperimentSettings(RunSettings):
    """A run described by plain values: its settings, its algorithm, its model and its data."""

    algorithm: Annotated[
        str, Help("An algorithm, e.g. fedavg; see `parsifl list algorithms`.", option="")
    ]
    settings: Annotated[
        dict[str, Any],
        Help(
            "Settings of the algorithm, e.g. lr=0.1, batch_size=none, milestones=10+20.",
            option="",
        ),
    ] = field(default_factory=dict)
    data: Annotated[str, Help("A dataset, e.g. digits or mnist:normalize=unit.")] = "digits"
    clients: Annotated[
        Count | None, Help("Number of clients. Default: every group of the dataset, or 20.")
    ] = None
    partition: Annotated[
        str | None,
        Help(
            "How rows are divided among clients, e.g. dirichlet:alpha=0.1. Default: that of the "
            "dataset."
        ),
    ] = None
    test: Annotated[
        Fraction | str,
        Help("Fraction of rows held out for testing, or a rule: all, shares, groups."),
    ] = 0.25
    validation: Annotated[
        Fraction, Help("Fraction of each client's rows held out for validation.")
    ] = 0.0
    model: Annotated[
        str,
        Help(
            'A model with options, e.g. mlp:hidden=100, vgg or glm. "auto": a linear model for '
            "regression and for sparse or double-precision data, the VGG for color images of 32 "
            "pixels and more, an MLP otherwise."
        ),
    ] = "auto"
    profiles: Annotated[
        str,
        Help(
            "Device profiles, e.g. budget=0.125+1,epochs=1+4: the values of each entry are given "
            "to consecutive groups of clients of equal size."
        ),
    ] = ""


@dataclass(frozen=True)
class Declaration:
    """A setting as its class declares it.

    `option` is its option on the command line, empty if it has none. `nested` are the settings of
    a setting that is a table; the default of a table is None here.
    """

    name: str
    hint: Any
    text: str
    option: str
    default: Any
    nested: tuple[Declaration, ...] = ()


@functools.cache
def declarations(kind: type[Any]) -> tuple[Declaration, ...]:
    """Return the settings of a class: its own, then those that it inherits."""
    hints = typing.get_type_hints(kind, include_extras=True)
    inherited = {
        each.name
        for base in kind.__mro__[1:]
        if dataclasses.is_dataclass(base)
        for each in dataclasses.fields(base)
    }
    fields = sorted(dataclasses.fields(kind), key=lambda each: each.name in inherited)
    return tuple(_declaration(each, hints[each.name]) for each in fields)


def _declaration(declared: dataclasses.Field[Any], hint: Any) -> Declaration:
    metadata = hint.__metadata__ if typing.get_origin(hint) is Annotated else ()
    (described,) = [each for each in metadata if isinstance(each, Help)] or [Help("", option="")]
    made = declared.default_factory is not dataclasses.MISSING
    default = None if made or declared.default is dataclasses.MISSING else declared.default
    kind = hint.__origin__ if metadata else hint
    table: Any = kind if dataclasses.is_dataclass(kind) else None
    nested = () if table is None else declarations(table)
    option = described.option
    if option is None:
        option = "" if nested else f"--{declared.name.replace('_', '-')}"
    return Declaration(declared.name, hint, described.text, option, default, nested)


def with_run_settings(function: F) -> F:
    """Give a function that takes `**settings: Unpack[RunOptions]` its signature and documentation.

    The declarations supply names, types and defaults for `help` and completion.
    """
    signature = inspect.signature(function)
    parameters = [
        each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD
    ]
    missing = [each for each in declarations(RunSettings) if each.name not in signature.parameters]
    defaults = RunSettings()
    parameters += [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(defaults, each.name),
            annotation=each.hint,
        )
        for each in missing
    ]
    vars(function)["__signature__"] = signature.replace(parameters=parameters)
    if function.__doc__:
        lines = [
            f"    {each.name}\n" + textwrap.indent(textwrap.fill(each.text, 92), " " * 8)
            for each in missing
        ]
        marker = "    **settings\n"
        function.__doc__ = function.__doc__.replace(marker, "\n".join([*lines, marker]))
    return function
