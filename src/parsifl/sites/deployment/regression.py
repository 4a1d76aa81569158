"""Sparse regression across sites: agree on columns, run rounds, and save an estimator."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parsifl import wire
from parsifl.core.errors import ConfigError, DataError, ParsiflError, WireError
from parsifl.core.problem import Problem
from parsifl.data.clients import ClientData
from parsifl.data.table_encoding import Array, NumberSums, Summary, unit_notes
from parsifl.engine.record import RoundRecord
from parsifl.engine.run_dir import read_records
from parsifl.engine.safe_files import replace_file
from parsifl.engine.training import RoundEnd, StopTraining, TrainingState
from parsifl.flower.exchange import RELEASE_SECONDS
from parsifl.flower.membership import Log
from parsifl.flower.message import Envelope, Link, Requests, printable
from parsifl.flower.network_schema import (
    RemoteFailure,
    SitesRefused,
    describe,
    read_reply,
)
from parsifl.flower.server import Federation
from parsifl.flower.settings import DeploymentSettings
from parsifl.sites import (
    FederatedSparseClassifier,
    FederatedSparseCox,
    FederatedSparsePoisson,
    FederatedSparseRegressor,
)
from parsifl.sites.deployment.agreement import Agreement, RegressionSpec
from parsifl.sites.deployment.messages import (
    AgreeReply,
    AgreeRequest,
    ProductsReply,
    ProductsRequest,
)
from parsifl.sites.deployment.table_site import guarded, problem_of
from parsifl.sites.estimators.base import FederatedSparse
from parsifl.sites.estimators.cv import Products
from parsifl.sites.estimators.exact import ExactFit
from parsifl.sites.estimators.saved import DeployedFit, assembled, to_text
from parsifl.sites.search.best_subset import symmetric
from parsifl.sites.search.fedbestsubset import BestSubsetState, FedBestSubset, as_search
from parsifl.sites.search.subset_state import ALWAYS, Phase

MODEL_FILE = "model.json"
_SUMS = dict[str, Tensor]
_AGREE_SECONDS = 90.0
_ESTIMATORS: dict[str, type[FederatedSparse]] = {
    "linear": FederatedSparseRegressor,
    "logistic": FederatedSparseClassifier,
    "poisson": FederatedSparsePoisson,
    "cox": FederatedSparseCox,
}
_CURE = (
    "correct the table or change the guards of the site and resume the run, or resume it with "
    'deployment.on_refusal="continue" to exclude the site'
)
_ENDS = {
    Phase.SEPARATED: "the selected columns separate the classes (or the events): the likelihood "
    "has no maximum; set l2 of the RegressionSpec, for example to 0.01",
    Phase.STALLED: "the search stopped because rounding or noise prevents a further decrease",
    Phase.LOOK: "the search did not converge within the rounds; the model is the best so far",
}


class Regression(Federation):
    """The server of a sparse regression; ends with an estimator in the run directory."""

    _files = (MODEL_FILE,)

    def __init__(
        self, settings: DeploymentSettings, link: Link, log: Log, spec: RegressionSpec
    ) -> None:
        # sites have no rows for tests, and refuse to score training rows
        experiment = replace(settings.experiment, evaluate_every=0)
        if changes := [name for name, text in experiment.changes().items() if text is not None]:
            raise ConfigError(
                f"the sites of a regression check the messages of plain algorithms: remove "
                f"{', '.join(changes)}"
            )
        experiment = guarded(experiment, spec)
        settings = replace(settings, experiment=experiment)
        if isinstance(
            settings.experiment.build_algorithm(), FedBestSubset
        ):  # its sums are over all sites
            settings = replace(settings, deployment=replace(settings.deployment, quorum=1.0))
        elif spec.family != "linear":
            name = settings.experiment.algorithm
            raise ConfigError(
                f"algorithm={name!r} supports only linear regression; use 'fedbestsubset' for "
                f"family={spec.family!r}"
            )
        super().__init__(settings, link, log, self._problem)
        self._spec = spec
        self._summaries: dict[int, Summary] = {}

    def _problem(self, data: ClientData) -> Problem:
        agreement = self._agreed()
        return problem_of(self._spec, agreement.kept, agreement.target_mean)(data)

    def _agreed(self) -> Agreement:
        return Agreement.read(self._pool.agreement)

    def _prepare(self, *, resumed: bool) -> None:
        """Agree on columns, levels, missing values and scales, in one round of sums."""
        if not resumed:
            self._pool.agreement = self._agree().to_json()
        if isinstance(self._algorithm, FedBestSubset):
            self._algorithm = self._fitted_algorithm(self._algorithm)
            self._pool.use(self._algorithm)

    def _run(self) -> Sequence[RoundRecord]:
        while True:
            try:
                return super()._run()
            except SitesRefused as refusal:
                if self._settings.deployment.on_refusal == "stop":
                    text = f"{refusal}\n{_CURE}"
                    raise SitesRefused(text, refusal.reasons, refusal.size) from None
                self._leave_out(refusal)

    def _leave_out(self, refusal: SitesRefused) -> None:
        """Start again without these sites, because means, scales and sums included them."""
        left_out = {**self._pool.left_out, **refusal.reasons}
        for client, reason in sorted(refusal.reasons.items()):
            self._log(f"site {client} is excluded from the fit: {reason}")
        if len(left_out) >= self._settings.clients:
            listed = "; ".join(reason for _, reason in sorted(left_out.items()))
            raise ParsiflError(f"no site is left for the fit: {listed}")
        path, (up, down) = self._run_dir.path, self._pool.booked
        records = read_records(path)
        up += refusal.size[0] + sum(record.bytes_up for record in records)
        down += refusal.size[1] + sum(record.bytes_down for record in records)
        if (path / "config.toml").exists():
            attempt = self._run_dir.set_aside()
            self._log(f"the earlier attempt is in {attempt.name}")
        owners = self._pool.members.owners()
        self._connect(left_out)
        self._pool.members.adopt(owners)
        self._pool.book(self._pool.present[0], up, down)

    def _agree(self) -> Agreement:
        described = self._described()
        columns = min(reply.columns for reply in described.values())
        noise = max(reply.noise for reply in described.values())
        self._summaries = {client: described[client].summary for client in sorted(described)}
        summaries = list(self._summaries.values())
        _check_units(described)
        for note in unit_notes(summaries, [f"client {client}" for client in self._summaries]):
            self._log(f"warning: {note}")
        return Agreement.of(summaries, self._spec, columns, noise)

    def _described(self) -> dict[int, AgreeReply]:
        """Return the aggregates of the table of every site."""
        described: dict[int, AgreeReply] = {}
        end = time.monotonic() + self._settings.deployment.wait
        reasons: dict[int, str] = {}
        refused: dict[int, tuple[int, str]] = {}  # by node: its client, and why
        wanted, members = set(self._pool.present), self._pool.members
        while True:
            # sites that could not answer are asked again: their tables may have been corrected
            nodes = members.nodes()
            asked = [node for node in nodes if reasons.get(node) != ""]
            requests: Requests = dict.fromkeys(asked, ("agree", AgreeRequest().envelope()))
            enough = members.all_of(wanted - set(described))
            for node, reply in self._link.ask(requests, _AGREE_SECONDS, enough).items():
                reason = self._take(node, reply, described, refused)
                if reason and reason != reasons.get(node):
                    self._log(f"node {node} cannot take part yet: {reason}")
                reasons[node] = reason
            if len(described) == len(wanted):
                break
            if time.monotonic() > end:
                text = f"{len(described)} of {len(wanted)} clients have described their tables; "
                text += "; ".join(sorted({reason for reason in reasons.values() if reason}))
                # a client that another node has described meanwhile is not refused
                refusing = {
                    client: why
                    for node, (client, why) in sorted(refused.items(), key=itemgetter(1))
                    if client not in described and not members.contradiction(client, node)
                }
                if wanted == {*described, *refusing}:
                    raise SitesRefused(text, refusing)
                raise ParsiflError(text)
            self._link.pause(1.0)
        return described

    def _take(
        self,
        node: int,
        reply: Envelope | str,
        described: dict[int, AgreeReply],
        refused: dict[int, tuple[int, str]],
    ) -> str:
        """Store a summary or a refusal; return why there is no summary, or an empty text."""
        members = self._pool.members
        refused.pop(node, None)
        try:
            message = read_reply(AgreeReply, reply)
            members.bind(message.client, node)
            described[message.client] = message
        except Exception as error:  # an invalid reply of one node must not affect the others
            client = error.client if isinstance(error, RemoteFailure) else None
            if client is not None and (reason := members.contradiction(client, node)):
                return reason
            if isinstance(error, RemoteFailure) and error.guard and client is not None:
                refused[node] = client, describe(error)
            return describe(error)
        size = len(reply.text.encode()) if isinstance(reply, Envelope) else 0
        self._pool.book(message.client, size, len(AgreeRequest().envelope().text))
        return ""

    def _fitted_algorithm(self, algorithm: FedBestSubset) -> FedBestSubset:
        """Select factors as a whole, and keep the number of candidates within the guards."""
        agreement = self._agreed()
        preprocessing = agreement.preprocessing
        _, labels, sizes = np.unique(preprocessing.units, return_inverse=True, return_counts=True)
        factors = tuple(labels.tolist()) if (sizes > 1).any() else ()
        width = len(labels) + (self._spec.family in ("logistic", "poisson"))
        support = int(np.sort(sizes)[::-1][: algorithm.tau].sum())
        always = len(agreement.kept) + (width - len(labels))
        room = agreement.columns - support - always
        candidates = algorithm.candidates
        if agreement.columns < width:
            if room < 1 and algorithm.tau:
                raise ParsiflError(
                    f"a site allows {agreement.columns} columns in one message, and tau="
                    f"{algorithm.tau} needs {support + always + 1}; choose a smaller tau"
                )
            wanted = 2 * algorithm.tau + 20 if candidates is None else candidates
            candidates = max(min(wanted, room), 1)
        if agreement.columns < width and not algorithm.gradients:
            self._log(
                f"the guards of a site allow {agreement.columns} of {width} columns in one "
                f"message: {candidates} candidates besides the support"
            )
        return replace(algorithm, units=factors, candidates=candidates, noise=agreement.noise)

    def _report(self, event: RoundEnd) -> None:
        super()._report(event)
        server = event.server
        if isinstance(server, BestSubsetState) and int(server.phase) >= Phase.CONVERGED:
            raise StopTraining("the search has converged")

    def _finish(self, problem: Problem, state: TrainingState) -> None:
        """Request the sums on the support, and save the resulting estimator."""
        server = state.server
        agreement, model = self._agreed(), self._algorithm.model(problem, server)
        if model is None:
            raise ConfigError(f"{type(self._algorithm).__name__} has no global model to save")
        b = model.params["coef"].to(torch.float64).numpy().copy()
        columns, present = np.flatnonzero(b), self._pool.present
        exact = isinstance(server, BestSubsetState)
        if isinstance(server, BestSubsetState) and isinstance(self._algorithm, FedBestSubset):
            rules = self._algorithm.rules(problem, server.coefficients)  # type: ignore[arg-type]
            columns = np.flatnonzero(server.support.numpy() | (rules.labels == ALWAYS))
        one_shot = exact and rules.quadratic and len(server.known) == rules.width
        if one_shot:  # the sums of the first round suffice; no further values need to leave
            asked, at = np.arange(rules.width), np.zeros(rules.width)
        else:
            asked, at = columns, b[columns] if exact else np.zeros(len(columns))
        sums = self._asked([int(position) for position in asked], at)
        size = sum(part.pop("size") for part in sums)
        products: list[Products] = []
        if one_shot:
            products = self._site_products(sums)
            answers = [part.answer(b, columns) for part in products]
        else:
            answers = [
                (part["loss"], part["gradient"], symmetric(part["curvature"], 0 * at))
                for part in sums
            ]
        losses, gradients, hessians = (np.stack(parts) for parts in zip(*answers, strict=True))
        if not exact:  # pooled least squares on the support
            b[columns] = np.linalg.lstsq(hessians.sum(0), -gradients.sum(0), rcond=1e-14)[0]
        history = [
            {name: getattr(record, name) for name in ("round", "trained", "bytes_up", "bytes_down")}
            for record in state.records
        ]
        fit = None
        if isinstance(server, BestSubsetState):
            fit = ExactFit(
                search=as_search(server),
                rules=rules,
                columns=columns,
                rows=np.array([float(self._pool.clients[i].samples) for i in present]),
                losses=losses,
                gradients=gradients,
                information=hessians,
                history=history,
                bytes_up=size,
                bytes_down=0,
                own_intercepts=False,
            )
            if getattr(self._algorithm, "gradients", False):
                fit = fit.polished()
                b = fit.search.coefficients
        if fit is not None and fit.search.phase != Phase.CONVERGED:
            self._log(f"warning: {_ENDS.get(fit.search.phase, _ENDS[Phase.LOOK])}")
        outcome = DeployedFit(
            preprocessing=agreement.preprocessing,
            sites=[str(number) for number in present],
            left_out={str(number): reason for number, reason in self._pool.left_out.items()},
            coefficients=b,
            exact=fit,
            target_mean=agreement.target_mean,
            classes=agreement.classes,
            solver="exact" if exact else self._experiment.algorithm,
            history=history,
            bytes_up=sum(record["bytes_up"] for record in history) + size,
            bytes_down=sum(record["bytes_down"] for record in history),
            constant=float(sum(part["constant"] for part in sums)),
            products=products,
        )
        estimator = _ESTIMATORS[self._spec.family](
            n_nonzero_coefs=getattr(self._algorithm, "tau", None),
            l2=self._spec.l2 or None,
            keep=list(self._spec.keep),
        )
        text = to_text(assembled(estimator, outcome))
        replace_file(self._run_dir.path / MODEL_FILE, text.encode())
        chosen = np.count_nonzero(b[: len(agreement.preprocessing.names)])
        self._log(f"{chosen} of {len(agreement.preprocessing.names)} coefficients are not zero")

    def _site_products(self, sums: Sequence[Mapping[str, Any]]) -> list[Products]:
        """Return count, sums and products of every site, in the agreed units."""
        agreement = self._agreed()
        if not self._summaries:  # the run was resumed
            described = self._described()
            self._summaries = {client: reply.summary for client, reply in described.items()}
        made = []
        for client, part in zip(self._pool.present, sums, strict=True):
            summary = self._summaries[client]
            target = summary.columns[self._spec.target]
            assert isinstance(target, NumberSums)
            totals = agreement.preprocessing.sums(summary)
            totals = np.append(totals, target.sum - summary.rows * agreement.target_mean)
            curvature = symmetric(part["curvature"], np.zeros(len(part["gradient"])))
            made.append(
                Products.from_zero(
                    part["loss"], part["gradient"], curvature, totals, float(summary.rows)
                )
            )
        return made

    def _asked(self, columns: list[int], at: Array) -> list[dict[str, Any]]:
        """Return loss, gradient and curvature of every site at these coefficients."""
        online = self._pool.members.online()
        requests = {
            client: ProductsRequest(
                client=client,
                round=0,
                experiment=self._pool.experiment,
                agreement=self._pool.agreement,
                support=tuple(columns),
                coefficients=tuple(float(value) for value in at),
            )
            for client in self._pool.present
            if client in online
        }
        sent: Requests = {
            online[client]: ("products", request.envelope()) for client, request in requests.items()
        }
        timeout = self._settings.deployment.timeout
        replies, end = self._link.ask(sent, timeout), time.monotonic() + timeout
        while time.monotonic() < end:
            waiting = {
                online[client]: sent[online[client]]
                for client, request in requests.items()
                if _unreleased(request, replies.get(online[client]))
            }
            if not waiting:
                break
            self._link.pause(RELEASE_SECONDS)
            replies = {**replies, **self._link.ask(waiting, timeout)}
        answers: list[dict[str, Any]] = []
        refused: dict[int, str] = {}
        for client in self._pool.present:
            if client not in requests:
                raise ParsiflError(f"client {client} is not connected for the last step; resume")
            try:
                reply = replies.get(online[client])
                answers.append(self._sums(requests[client], reply, len(columns)))
            except SitesRefused as refusal:
                refused |= refusal.reasons
        if refused:
            size = sum(part["size"] for part in answers)
            raise SitesRefused("; ".join(refused.values()), refused, (size, 0))
        return answers

    def _sums(
        self, request: ProductsRequest, reply: Envelope | str | None, size: int
    ) -> dict[str, Any]:
        try:
            read_reply(ProductsReply, reply, request)
            data = reply.parts["sums"] if isinstance(reply, Envelope) else b""
            message = wire.decode(data, _SUMS, limit=16 * (size + 2) ** 2 + 4096)
            shapes = {"loss": (), "constant": (), "gradient": (size,)}
            shapes |= {"curvature": (size * (size + 1) // 2,)}
            form = {
                name: torch.empty(shape, dtype=torch.float64, device="meta")
                for name, shape in shapes.items()
            }
            wire.check(message, form)
        except Exception as error:  # all sums are needed: the run stops, and names the client
            if isinstance(error, RemoteFailure) and error.guard:
                raise SitesRefused(str(error), {request.client: describe(error)}) from None
            raise ParsiflError(
                f"client {request.client} sent no usable sums: {describe(error)}; resume the run"
            ) from None
        return {"size": len(data), **{name: part.numpy().copy() for name, part in message.items()}}


def _unreleased(request: ProductsRequest, reply: Envelope | str | None) -> bool:
    """Return whether a person at the site must release the reply first."""
    try:
        read_reply(ProductsReply, reply, request)
    except WireError as error:
        return isinstance(error, RemoteFailure) and error.unreleased
    return False


def _check_units(replies: Mapping[int, AgreeReply]) -> None:
    """Reject columns for which sites declare different units."""
    units: dict[str, tuple[str, int]] = {}
    for client, reply in sorted(replies.items()):
        for name, unit in reply.units.items():
            known, first = units.setdefault(name, (unit, client))
            if known != unit:
                raise DataError(
                    printable(
                        f"column '{name}': client {first} declares the unit {known!r}, client "
                        f"{client} {unit!r}; convert it at one of them"
                    )
                )
