"""A site with a table: the schema of its columns, and guarded answers to requests."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, final

import numpy as np
import torch
from annotated_types import MaxLen
from pydantic import ConfigDict, TypeAdapter, ValidationError

from parsifl import wire
from parsifl.core import registry, tree
from parsifl.core.batching import ClientRoundData
from parsifl.core.errors import ConfigError, DataError, WireError
from parsifl.core.problem import CurvatureSums, Problem
from parsifl.data.clients import ClientData
from parsifl.data.ragged import Ragged
from parsifl.data.table_encoding import (
    ABSENT,
    LONGEST,
    MOST_LEVELS,
    RARE,
    Array,
    is_words,
    observed,
)
from parsifl.data.tables import Column, Columns, MixedColumnError, as_columns, is_table
from parsifl.engine.experiment import Experiment
from parsifl.flower.client import MakeProblem, NodeConfig, RemoteClient
from parsifl.flower.hello import DataSchema
from parsifl.flower.logs import node_log
from parsifl.flower.message import Envelope, Kind, printable
from parsifl.flower.network_schema import (
    EvaluateRequest,
    FailureReply,
    TrainRequest,
    WorkRequest,
    failure_in,
    read,
)
from parsifl.linear.glm import GLM
from parsifl.linear.sums import upper
from parsifl.sites.deployment import guards as rules
from parsifl.sites.deployment.agreement import Agreement, Prepared, RegressionSpec
from parsifl.sites.deployment.guards import (
    SEPARATOR,
    Audit,
    Guards,
    Refusal,
    check_history,
    digest,
    few_differ,
    rare,
)
from parsifl.sites.deployment.messages import (
    REQUESTS,
    AgreeReply,
    AgreeRequest,
    ProductsReply,
    ProductsRequest,
)
from parsifl.sites.deployment.row_terms import RowTerms, all_rows, keyed_noise
from parsifl.sites.families.cox import Cox
from parsifl.sites.search.fedbestsubset import BestSubsetQuestion, FedBestSubset

_MARGIN = 0.1
"""How much a forecast may exceed a limit of leverage: the fit of all sites is another one."""
Hide = Callable[[CurvatureSums], CurvatureSums]
"""Adds the noise of a request to its sums."""
_PASSING = ("experiment", "machine")
"""Fields about the run and the machine, ignored when deciding whether a reply is new."""
LoadTable = Callable[[NodeConfig], Any]
"""Returns columns of text by name (`read_csv`), or a pandas or polars frame."""


@final
@dataclass(frozen=True)
class ColumnSchema:
    """A site's declaration of one column.

    Parameters
    ----------
    kind
        "number" or "words".
    unit
        The unit; sites that declare different ones are not combined.
    range
        The smallest and the largest number.
    levels
        The words that may occur; empty: any.
    missing
        Codes that mark a missing value in this column.
    """

    kind: Literal["number", "words"]
    unit: Annotated[str, MaxLen(100)] = ""
    range: tuple[float, float] | None = None
    levels: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class TableSchema:
    """A site's declaration of its table.

    Parameters
    ----------
    missing
        Codes that mark a missing value, besides the standard ones (empty, NA, ?, ...).
    words
        Columns that hold words although some or all of their values look like numbers.
    columns
        Declared columns. Others are not read; empty: all are.
    targets
        The columns that may be predicted; empty: any.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    missing: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    columns: dict[str, ColumnSchema] = field(default_factory=dict)
    targets: tuple[str, ...] = ()

    def joined(self, node: Mapping[str, Any]) -> TableSchema:
        """Add the declarations of the node's configuration.

        `missing` and `words` are separated by `|`; `schema` names a TOML file with the same
        entries as this class.

        >>> TableSchema().joined({"missing": "N/A|.|<0.3"}).missing
        ('N/A', '.', '<0.3')
        """
        declared = {
            name: tuple(str(node[name]).split(SEPARATOR)) if name in node else ()
            for name in ("missing", "words")
        }
        file = _read_schema(Path(str(node["schema"]))) if "schema" in node else TableSchema()
        return TableSchema(
            self.missing + file.missing + declared["missing"],
            self.words + file.words + declared["words"],
            {**self.columns, **file.columns},
            self.targets + file.targets,
        )

    @property
    def units(self) -> dict[str, str]:
        """The declared units."""
        return {name: column.unit for name, column in self.columns.items() if column.unit}


def _read_schema(path: Path) -> TableSchema:
    try:
        return TypeAdapter(TableSchema).validate_python(tomllib.loads(path.read_text()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(str(step) for step in first["loc"])
        raise ConfigError(f"{path}: {location}: {first['msg']}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a schema: {error}") from None


def prepare(table: Any, spec: RegressionSpec, schema: TableSchema, guards: Guards) -> Prepared:
    """Return a table from which aggregates may leave, or raise `Refusal`.

    Levels with too few rows are merged into one level, also if only the rows of one class, or
    those with an event, are too few. A column of numbers with too few values, or with the same
    value in all but a few rows, is withheld: all its values count as missing. Only the node's log
    names the rows at fault.
    """
    columns = _typed(table, spec, schema)
    fault = spec.checked(columns)
    if fault:
        raise Refusal("target", fault)
    rows = {len(column) for column in columns.values()}
    if len(rows) > 1 or min(rows) < guards.rows:
        raise Refusal("rows", f"its columns have unequal lengths, or fewer than {guards.rows} rows")
    strata = _strata(columns, spec)
    guarded = {
        name: _merged(name, column, strata, guards)
        if is_words(column)
        else _withheld(name, np.asarray(column, np.float64), guards)
        for name, column in columns.items()
    }
    for name in spec.columns:
        if not np.array_equal(guarded[name], columns[name]):
            raise Refusal("target", f"the column '{name}' is the same in all but a few rows")
    return Prepared(guarded, spec)


def _typed(table: Any, spec: RegressionSpec, schema: TableSchema) -> dict[str, Column]:
    """Return the typed columns that the site reads."""
    names = [str(name) for name in getattr(table, "columns", table)]
    if schema.targets and spec.target not in schema.targets:
        raise Refusal("target", f"it does not allow '{spec.target}' to be predicted")
    if not set(names) >= {*schema.words, *schema.columns}:
        raise Refusal("schema", "a declared column is not in its table")
    words = {*schema.words, *(n for n, c in schema.columns.items() if c.kind == "words")}
    words |= {spec.target} if spec.family == "logistic" else set()
    typed: dict[str, Column] = {}
    try:
        for name in [name for name in names if not schema.columns or name in schema.columns]:
            declared = schema.columns.get(name)
            codes = (*schema.missing, *(declared.missing if declared else ()))
            part = table[[name]] if is_table(table) else {name: table[name]}
            typed |= as_columns(part, codes, words)
            if declared is not None:
                _check_declared(name, typed[name], declared, words)
    except MixedColumnError as error:
        values = list(table[error.name])
        listed = ", ".join(f"row {row} ({values[row - 1]!r:.40})" for row in error.rows[:10])
        count = len(error.rows)
        node_log().error("column %r: %d values are not numbers: %s", error.name, count, listed)
        raise Refusal("numbers", f"{error}, in the node's configuration") from None
    except DataError as error:  # its text names columns, never values
        raise Refusal("table", str(error)) from None
    return typed


def _check_declared(name: str, column: Column, declared: ColumnSchema, words: set[str]) -> None:
    """Refuse a column that is not as declared; only the node's log names the rows at fault."""
    if is_words(column) is not (name in words):
        raise Refusal("schema", f"column '{name}': declared as numbers, but contains words")
    outside = np.zeros(len(column), np.bool_)
    if declared.levels:
        outside = observed(column) & ~np.isin(column, np.array(declared.levels))
    elif declared.range is not None and not is_words(column):
        numbers, (low, high) = np.asarray(column, np.float64), declared.range
        outside = observed(column) & ~((numbers >= low) & (numbers <= high))
    if outside.any():
        rows = ", ".join(str(row + 1) for row in np.flatnonzero(outside)[:10])
        node_log().error("column %r: %d values are not as declared: rows %s", name,
                         int(outside.sum()), rows)  # fmt: skip
        raise Refusal("schema", f"column '{name}': values that its schema does not allow")


def _strata(columns: Columns, spec: RegressionSpec) -> Column | None:
    """Return the classes or events, whose cells with a level must not be small."""
    if spec.family == "logistic":
        return columns[spec.target]
    return columns[spec.event] if spec.event else None


def _merged(name: str, column: Column, strata: Column | None, guards: Guards) -> Column:
    values = [str(value) for value in column]
    if RARE in values or ABSENT in values:
        raise Refusal(
            "marker", f"column '{name}': {RARE} and {ABSENT} are reserved; rename that level"
        )
    counts = [Counter(values)]
    if strata is not None and strata is not column:
        counts += [Counter(column[strata == stratum].tolist()) for stratum in np.unique(strata)]
    few = rare(counts, guards.cell)
    merged = np.array([RARE if value in few else value for value in values])
    levels = set(merged.tolist())
    if len(levels) > MOST_LEVELS or any(len(level) > LONGEST for level in levels):
        raise Refusal("levels", f"column '{name}': too many levels, or a level that is too long")
    return merged


def _withheld(name: str, numbers: Array, guards: Guards) -> Array:
    there = numbers[~np.isnan(numbers)]
    if len(there) and (len(there) < guards.rows or few_differ(there, guards.cell)):
        node_log().warning(
            "column %r: withheld, because too few rows differ from the common value", name
        )
        return np.full(len(numbers), np.nan)
    return numbers


def guarded(experiment: Experiment, spec: RegressionSpec) -> Experiment:
    """Return the experiment of sites with guards: sums of GLMs and Cox models are gradients."""
    if registry.find(experiment.algorithm) is not FedBestSubset or spec.family == "linear":
        return experiment
    return replace(experiment, settings={**experiment.settings, "gradients": True})


def problem_of(
    spec: RegressionSpec, always: tuple[int, ...] = (), mean: float | None = None
) -> MakeProblem:
    """Return a function that builds the problem; columns are centred, rows have weights.

    An intercept starts at that of a model with this mean of the target and no columns.
    """

    def make(data: ClientData) -> Problem:
        width = int(data.x.shape[1])
        if spec.family == "cox":
            return Cox(width, l2=spec.l2, keep=always, weighted=True)
        loss = "squared-half" if spec.family == "linear" else spec.family
        return GLM(
            width,
            loss,
            l2=spec.l2,
            intercept=spec.family != "linear",  # the target of a linear regression is centred
            keep=always,
            weighted=True,
            offset=spec.family == "poisson",
            start=_start(spec, width, mean),
        )

    return make


def _start(spec: RegressionSpec, width: int, mean: float | None) -> Array | None:
    if not mean or spec.family not in ("logistic", "poisson"):
        return None
    odds = mean / (1 - mean) if spec.family == "logistic" and mean < 1 else mean
    return np.append(np.zeros(width), np.log(odds))


class TableSite:
    """A site with a table, which sends aggregates, trains on its encoded rows, and sends products.

    Parameters
    ----------
    root
        The state directory; the audit file is in its subdirectory `client-NUMBER`.
    spec
        The model; a request that names another one is refused.
    schema
        The site's declaration of its columns.
    guards
        The site's limits. Every request is checked against them, against the site's own table and
        against what was released before; a request that breaks a rule is answered with that rule
        and no data.
    """

    def __init__(
        self,
        experiment: Experiment,
        client: int,
        table: Any,
        root: Path,
        spec: RegressionSpec,
        schema: TableSchema | None = None,
        guards: Guards | None = None,
    ) -> None:
        self._experiment, self._client, self._root = guarded(experiment, spec), client, root
        self._table, self._spec = table, spec
        self._schema, self._guards = schema or TableSchema(), guards or Guards()
        self._sums = FedBestSubset(0, gradients=spec.family != "linear")
        self._audit = Audit(root / f"client-{client}")

    def answer(self, kind: Kind, envelope: Envelope) -> Envelope:
        """Answer a request of this kind; nothing leaves the site in any other way."""
        entry: dict[str, Any] = {"kind": kind}
        with self._audit.locked():
            try:
                reply = self._answer(kind, envelope, entry)
            except Refusal as refusal:
                reply = self._refuse(refusal.rule, str(refusal))
            except WireError as error:  # its message describes the request, not the table
                reply = self._refuse("request", str(error))
            except Exception:
                node_log().exception("a request for '%s' could not be answered", kind)
                reply = self._refuse(
                    "failure", "the computation failed; the reason is in the node's log"
                )
            if self._guards.release == "manual" and failure_in(reply) is None:
                reply = self._approved(kind, reply)
            size = sum(len(part) for part in reply.parts.values())
            self._audit.write({**entry, "bytes": size, **json.loads(reply.text)})
        return reply

    def _look_ahead(
        self, prepared: Prepared, table: Mapping[str, Sequence[str]], entry: dict[str, Any]
    ) -> None:
        """Refuse a fit that cannot be answered, before anything about it leaves the site."""
        algorithm, guards = self._experiment.build_algorithm(), self._guards
        if self._spec.family == "linear" or not isinstance(algorithm, FedBestSubset):
            return
        from parsifl.sites.deployment.forecast import forecast  # it fits with `problem_of`

        _, ledger, rows = self._audit.ledger(table, guards)
        ahead = forecast(prepared, algorithm, ledger, rows, guards)
        if ahead is None:
            return
        entry["forecast"] = {"row": ahead.alone.single, "pair": ahead.alone.pair, **ahead.further}
        node_log().info(
            "a fit with %d terms has a leverage of about %.2f of a row and %.2f of a pair in a new "
            "ledger; further fits that this ledger allows: %s", algorithm.tau, ahead.alone.single,
            ahead.alone.pair, ahead.further,
        )  # fmt: skip
        row, pair = (min(one + _MARGIN, 1.0) for one in (guards.row_limit, guards.pair_limit))
        if ahead.alone.single > row or ahead.alone.pair > pair:
            asked = digest("forecast", entry["table"], asdict(self._spec), algorithm.tau)
            self._audit.count_refusal(asked, guards)
            raise Refusal(
                "forecast",
                f"a fit with {algorithm.tau} terms would make a row or a pair stand out among "
                f"{prepared.rows} rows; choose fewer terms or set l2 (its owner can choose another "
                "guard-profile)",
            )

    def _approved(self, kind: Kind, reply: Envelope) -> Envelope:
        """Return a reply that a person at the site has approved; otherwise store it and refuse."""
        head = json.loads(reply.text)
        said = {name: head[name] for name in head if name not in _PASSING}
        name = digest(said, *map(reply.parts.get, sorted(reply.parts)))
        if self._audit.approved(name, kind, reply.text):
            return reply
        return self._refuse("release", "a person at the site must release this reply first")

    def _refuse(self, rule: str, text: str) -> Envelope:
        reason = printable(f"site {self._client} refuses (rule '{rule}'): {text}")
        node_log().warning("%s", reason)
        failure = FailureReply(error="Refusal", rule=rule, detail=reason, client=self._client)
        return failure.envelope()

    def _answer(self, kind: Kind, envelope: Envelope, entry: dict[str, Any]) -> Envelope:
        request = read(REQUESTS[kind], envelope)
        if isinstance(request, EvaluateRequest):
            raise Refusal("evaluate", "it has no rows for tests, and does not score training rows")
        if getattr(request, "client", self._client) != self._client:
            raise WireError("client: the request is for another client")
        rules.check_algorithm(self._experiment, self._spec.family, self._guards)
        prepared = prepare(self._table, self._spec, self._schema, self._guards)
        rules.check_plan(self._experiment, self._client, prepared.rows, self._guards)
        table = self._text(prepared)
        entry["table"] = digest(table)
        if isinstance(request, AgreeRequest):
            self._audit.enter(digest("agree", entry["table"]), table, {}, 0.0, self._guards)
            self._look_ahead(prepared, table, entry)
            most = self._guards.columns(prepared.rows)
            return AgreeReply(
                client=self._client,
                columns=most,
                noise=self._guards.noise,
                units=self._schema.units,
                summary=prepared.summary(),
            ).envelope()
        agreed = getattr(request, "agreement", None)
        if agreed is None:
            raise WireError("agreement: missing; a site does not answer without one")
        agreement = Agreement.read(agreed)
        rules.check_agreement(agreement, prepared, self._guards)
        x, y = (
            agreement.preprocessing.standardised(prepared.columns),
            agreement.targets(prepared.columns),
        )
        data = data_of(x, y)
        make = problem_of(self._spec, agreement.kept)
        if isinstance(request, ProductsRequest):
            return self._products(request, agreement, prepared, data, make(data), entry)
        site = RemoteClient(self._experiment, self._client, data, self._root, make)
        if not isinstance(request, WorkRequest):
            return site.hello()
        if request.data_schema != DataSchema.of(data):
            raise Refusal("data-schema", "the agreed schema of a row does not match its table")
        assert isinstance(request, TrainRequest)
        self._hold(request, agreement, entry, request.round, envelope.parts.get("down"))
        problem: Any = make(data)
        if isinstance(self._experiment.build_algorithm(), FedBestSubset):
            hide = self._check_sums(envelope, prepared, agreement, data, problem, entry)
            return self._hidden(_whole(site.train(request, envelope.parts)), hide)
        # other algorithms may combine all products of columns
        start, columns = torch.zeros(problem.width, dtype=torch.float64), range(problem.width)
        self._release(prepared, agreement, data, problem, start, columns, entry)
        return self._narrow(_whole(site.train(request, envelope.parts)), prepared.rows, entry)

    def _check_sums(
        self,
        envelope: Envelope,
        prepared: Prepared,
        agreement: Agreement,
        data: ClientData,
        problem: Any,
        entry: dict[str, Any],
    ) -> Hide:
        """Check a round of sums: few columns, no small cell, and no row that stands out."""
        kind = self._experiment.build_algorithm().tree_types().downlink
        try:
            question = wire.decode(envelope.parts.get("down", b""), kind, limit=1 << 28)
            at = question.at[problem.name]
            candidates = [int(position) for position in question.candidates]
            used = [int(position) for position in at.nonzero()[:, 0]]
            fits = at.shape == (problem.width,)
        except (WireError, LookupError, AttributeError, TypeError, ValueError):
            raise WireError("down: not a question about sums") from None
        if not fits:
            raise WireError("down: not a question about sums")
        rules.check_question(candidates, used, problem.width, prepared.rows, self._guards)
        return self._release(prepared, agreement, data, problem, at, candidates, entry)

    def _hidden(self, reply: Envelope, hide: Hide) -> Envelope:
        """Return a reply whose sums have noise."""
        if "upload" not in reply.parts:
            return reply
        sums = hide(wire.decode(reply.parts["upload"], CurvatureSums, limit=1 << 31))
        upload = wire.encode(sums, self._experiment.precision)
        return Envelope(reply.text, {**reply.parts, "upload": upload})

    def _release(
        self,
        prepared: Prepared,
        agreement: Agreement,
        data: ClientData,
        problem: Any,
        at: torch.Tensor,
        columns: Sequence[int],
        entry: dict[str, Any],
    ) -> Hide:
        """Check sums at these coefficients with the ledger; return what hides them in noise."""
        names, units = agreement.preprocessing.names, agreement.preprocessing.units
        owners = [agreement.preprocessing.columns[unit].name for unit in units]
        inner = [position for position in columns if position < len(names)]
        used = [
            position for position in np.flatnonzero(at.numpy()).tolist() if position < len(names)
        ]
        x, columns = np.asarray(data.x), list(columns)
        rules.check_cells(prepared, owners, x, sorted({*inner, *used}), self._guards)
        entry["columns"] = [names[position] for position in inner]
        request = digest(entry["table"], agreement.to_json(), columns, at.tolist())
        if self._spec.family == "linear":
            block = {names[position]: x[:, position] for position in sorted({*columns, *used})}
            block["(target)"] = data.y[:, 0].numpy()
            self._audit.enter(request, self._text(prepared), block, 0.0, self._guards)
            return lambda sums: sums
        terms, width = RowTerms.of(problem, data, at), self._guards.noise
        block = terms.block(columns, [*names, "(intercept)"], diagonal=not used)
        self._audit.enter(request, self._text(prepared), block, width, self._guards)
        secret = self._audit.secret()
        return lambda sums: terms.noisy(sums, columns, width, secret, request)

    def _text(self, prepared: Prepared) -> dict[str, list[str]]:
        """Return the values of the table that identify its rows."""
        return {name: list(map(str, self._table[name])) for name in prepared.columns}

    def _hold(
        self,
        request: TrainRequest | ProductsRequest,
        agreement: Agreement,
        entry: dict[str, Any],
        *what: Any,
    ) -> None:
        """Check a request against what was released before."""
        entry["run"] = request.experiment
        entry["agreement"] = digest(agreement.to_json())
        entry["request"] = digest(*what)
        check_history(self._audit.entries(), entry, self._experiment.rounds, self._guards)

    def _narrow(self, reply: Envelope, rows: int, entry: dict[str, Any]) -> Envelope:
        """Return a reply whose upload has few coefficients for the number of rows."""
        if "upload" in reply.parts:
            kind = self._experiment.build_algorithm().tree_types().uplink
            leaves = tree.leaves(wire.decode(reply.parts["upload"], kind, limit=1 << 31))
            entry["coefficients"] = sum(int(leaf.count_nonzero()) for leaf in leaves)
            rules.check_width(entry["coefficients"], rows, self._guards)
        return reply

    def _products(
        self,
        request: ProductsRequest,
        agreement: Agreement,
        prepared: Prepared,
        data: ClientData,
        problem: Any,
        entry: dict[str, Any],
    ) -> Envelope:
        """Return loss, gradient and curvature at the requested coefficients."""
        width = problem.width
        support = rules.check_support(
            request.support, width, self._experiment, prepared.rows, self._guards
        )
        if len(request.coefficients) != len(support):
            raise WireError("coefficients: one for each column of the support is needed")
        self._hold(request, agreement, entry, support, list(request.coefficients))
        at, columns = torch.zeros(width, dtype=torch.float64), torch.tensor(support)
        at[columns] = torch.tensor(request.coefficients, dtype=torch.float64)
        hide = self._release(prepared, agreement, data, problem, at, support, entry)
        model = {problem.name: at}
        question = BestSubsetQuestion(model, model, columns)
        rows = ClientRoundData({}, all_rows(data), torch.tensor(0), 0)
        noisy = hide(self._sums.client_update(problem, question, None, rows).upload)
        counts = np.zeros(1)
        if self._spec.family == "poisson":
            counts = torch.lgamma(data.y[:, 0] + 1).numpy()
        largest, name = np.abs(counts).max(), f"{entry['table']} constant"
        hidden = keyed_noise(self._audit.secret(), name, np.asarray(largest), self._guards.noise)
        sums = {
            "loss": noisy.loss,
            "constant": torch.tensor(float(counts.sum() + hidden), dtype=torch.float64),
            "gradient": noisy.gradient[columns],
            "curvature": upper(self._sums.hessian(noisy.curvature, columns)),
        }
        head = {name: getattr(request, name) for name in ("client", "round", "experiment")}
        return ProductsReply(**head).envelope({"sums": wire.encode(sums)})


def _whole(reply: Envelope) -> Envelope:
    """Return a successful reply; the message of a failure may contain values."""
    failure = failure_in(reply)
    if failure is not None:
        node_log().error("local work failed: %s", failure.reason)
        raise Refusal("failure", "the computation failed; the reason is in the node's log")
    return reply


def data_of(x: Array, y: Array) -> ClientData:
    """Return rows as the data of one client."""
    rows, none = Ragged.of([range(len(y))]), Ragged.empty(1)
    features, targets = torch.from_numpy(x), torch.from_numpy(y)
    return ClientData(features, targets, rows, none, none, ({},), name="own")
