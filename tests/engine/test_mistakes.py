from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from tests.support.fixtures import clients
from torch import Tensor, nn
from torch.nn import functional

import parsifl
from parsifl.algorithms.fedavg import FedAvg
from parsifl.core.errors import CapabilityError, ClientError, ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.core.metrics import Metric
from parsifl.data.ragged import Ragged
from parsifl.engine.batch_sampler import BatchSampler
from parsifl.engine.checks import check_fit
from parsifl.linear.design import as_design


class Noisy(nn.Module):
    """Drops units without a key."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.layer(x), 0.5, self.training)


@pytest.mark.parametrize("engine", ["loop", "fused", "auto"])
def test_randomness_inside_a_model_is_refused(engine: str) -> None:
    before = torch.get_rng_state()
    problem = parsifl.NeuralProblem(Noisy, dtype=torch.float64)
    with pytest.raises(CapabilityError, match="draws its own random numbers"):
        parsifl.simulate(parsifl.get("fedavg"), problem, clients(), 1, executor=engine)  # type: ignore[arg-type]  # by parameter
    assert torch.equal(before, torch.get_rng_state())


def test_labels_beyond_the_outputs_are_told() -> None:
    x = np.zeros((8, 3), np.float32)
    good = [(x, np.arange(8) % 2)] * 3
    problem = parsifl.NeuralProblem(lambda: nn.Linear(3, 2))
    with pytest.raises(DataError, match=r"client 3 has label 5, .* must be in"):
        parsifl.simulate(parsifl.get("fedavg"), problem, [*good, (x, np.full(8, 5))], 1)


ROWS = np.zeros((8, 3), np.float32)
LABELS = np.arange(8) % 2


@pytest.mark.parametrize(
    ("problem", "x", "y", "told"),
    [
        (
            parsifl.NeuralProblem(lambda: nn.Sequential(nn.ReLU(), nn.Linear(784, 2))),
            ROWS,
            LABELS,
            r"rows of shape \[3\] and torch.float32 .*first layer is 1: Linear\(in_features=784",
        ),
        (
            parsifl.NeuralProblem(lambda: nn.Conv2d(1, 2, 3)),
            ROWS,
            LABELS,
            r"first layer is Conv2d\(1, 2",
        ),
        (
            parsifl.NeuralProblem(lambda: nn.Linear(3, 2)),
            csr_matrix(ROWS),
            LABELS,
            r"sparse rows of shape \[3\].*X.toarray\(\), or use parsifl.GLM",
        ),
        (parsifl.GLM(5), csr_matrix(ROWS), ROWS[:, 0], r"rows of shape \[3\].*has 5 features"),
        (
            parsifl.NeuralProblem(lambda: nn.LSTM(3, 2)),
            ROWS,
            LABELS,
            r"TypeError: it returns a tuple instead of a tensor",
        ),
        (parsifl.GLM(5), ROWS, ROWS[:, 0], r"rows of shape \[3\].*has 5 features"),
        (
            parsifl.NeuralProblem(lambda: nn.Linear(3, 2)),
            ROWS,
            ROWS[:, 0],
            "cross-entropy needs one integer label per row",
        ),
        (
            parsifl.NeuralProblem(lambda: nn.Linear(3, 2), "mse"),
            ROWS,
            ROWS[:, 0],
            r"targets of shape \[\].*predicts, shape \[2\].* as many numbers as outputs",
        ),
        (
            parsifl.NeuralProblem(lambda: nn.Embedding(9, 2)),
            ROWS,
            LABELS,
            r"expects integers, which ClientData.of\(clients, dtype=torch.int64\) keeps",
        ),
    ],
)
def test_data_that_do_not_fit_the_model_are_told_before_anything_is_written(
    tmp_path: Path, problem: Any, x: Any, y: Any, told: str
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(DataError, match=told):
        parsifl.simulate(FedAvg(local_steps=1), problem, [(x, y)] * 2, 1, run_dir=folder)
    assert not folder.exists()


class Words(nn.Module):
    """Tells classes by the mean of the vectors of some words."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Embedding(50, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.vectors(x).mean(1))
        return logits


def test_integers_stay_integers_for_a_model_that_takes_tokens_alone() -> None:
    tokens = np.arange(40).reshape(8, 5)
    whole = tokens.astype(np.float32)
    words, linear = parsifl.NeuralProblem(Words), parsifl.NeuralProblem(lambda: nn.Linear(5, 2))

    def servers(problem: parsifl.NeuralProblem, *features: Any) -> list[Any]:
        return [
            parsifl.simulate(FedAvg(local_steps=2), problem, [(x, LABELS)] * 3, 2).server
            for x in features
        ]

    first, *others = servers(words, tokens, tokens.astype(np.uint8), tokens.tolist())
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    real, same = servers(linear, whole, tokens)
    assert all(torch.equal(real[name], same[name]) for name in real)
    kept = parsifl.ClientData.of([(tokens, LABELS)] * 3, dtype=torch.int64)
    with pytest.raises(DataError, match=r"expects real numbers; ClientData.of\(clients\) converts"):
        parsifl.simulate(FedAvg(local_steps=2), linear, kept, 1)


def test_labels_of_rows_that_nobody_has_do_not_matter() -> None:
    data = clients()
    y = data.y.clone()
    y[data.test[0]] = 7
    problem = parsifl.NeuralProblem(lambda: nn.Linear(4, 3), dtype=torch.float64)
    with pytest.raises(DataError, match="client 0 has label 7, but the model has 3 outputs"):
        parsifl.simulate(FedAvg(local_steps=1), problem, replace(data, y=y), 1)
    nobody = [np.zeros(0, np.int64), *data.test[1:]]
    parsifl.simulate(FedAvg(local_steps=1), problem, replace(data, y=y, test=nobody), 1)


def test_labels_are_not_looked_up_client_by_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A million clients and some rows without a label would take minutes."""
    data = clients((6, 9))
    data = replace(data, train=Ragged.of(data.train), test=Ragged.of([[], [len(data.y) - 1]]))
    problem = parsifl.NeuralProblem(lambda: nn.Linear(4, 3), dtype=torch.float64)
    monkeypatch.setattr(Ragged, "__getitem__", None)
    last = data.y.clone()
    last[-2:] = torch.tensor([-1, 8])
    for y, client in ((data.y.where(torch.arange(len(data.y)) != 6, -1), None), (last, 1)):
        with pytest.raises(DataError, match="1 has label 8") if client else nullcontext():
            check_fit(problem, problem.init(Key(0)), replace(data, y=y), as_design(data.x), y)


class Own:
    """Squared error of a line; what it tells of new rows is no tensor."""

    primary_metric, higher_is_better = "mse", False
    supports_vmap, uses_batch_statistics = True, False

    def init(self, key: Key) -> dict[str, Tensor]:  # noqa: ARG002 - the contract names it
        return {"w": torch.zeros(4, dtype=torch.float64)}

    def loss(self, params: Any, batch: Any) -> Tensor:
        share = batch.weight / batch.weight.sum()
        loss: Tensor = ((batch.x @ params["w"] - batch.y).square() * share).sum()
        return loss

    def predict(self, params: Any, x: Any) -> Any:
        return {"mean": x @ params["w"]}

    def metrics(self, params: Any, rows: Any) -> dict[str, Tensor]:
        return {"mse": (rows.x @ params["w"] - rows.y).square()}


def test_a_problem_of_ones_own_need_not_be_like_ours() -> None:
    assert parsifl.simulate(FedAvg(local_steps=1), Own(), clients(), 1).summary()["global"]


def test_a_model_is_tried_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that meet after each layer would take a second where another program is busy."""
    problem, seen = parsifl.NeuralProblem(lambda: nn.Linear(4, 3), dtype=torch.float64), []
    predict = problem.predict

    def noted(params: Any, x: Any) -> Tensor:
        seen.append(torch.get_num_threads())
        return predict(params, x)

    monkeypatch.setattr(problem, "predict", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        BatchSampler(clients(), problem)
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_a_model_predicts_for_arrays() -> None:
    problem = parsifl.NeuralProblem(lambda: nn.Linear(3, 2))
    found = problem.predict(problem.init(Key(0)), np.zeros((5, 3)))
    assert found.shape == (5, 2)


def linear() -> nn.Module:
    return nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rounds": 1.5}, r"rounds = 1\.5: Input should be a valid integer"),
        ({"rounds": True}, "rounds = True: Input should be a valid integer"),
        ({"rounds": "3"}, "rounds = '3': Input should be a valid integer"),
        ({"seed": -1}, "seed = -1: Input should be greater than or equal to 0"),
        ({"evaluate_every": None}, "evaluate_every = None: Input should be a valid integer"),
        ({"participation": "half"}, "participation = 'half': Input should be a valid number"),
        ({"algorithm": "ditto"}, r"got 'ditto'; write parsifl\.get\('ditto'\)"),
        ({"algorithm": FedAvg}, r"got the class FedAvg; write FedAvg\(\)"),
        ({"problem": linear()}, r"the bare module Linear; write parsifl\.NeuralProblem"),
        ({"problem": parsifl.NeuralProblem}, "got the class NeuralProblem"),
        ({"problem": None}, "got None"),
        ({"clients": None}, r"one \(X, y\) for each client.*got None"),
        ({"clients": "digits"}, "got a str"),
        ({"clients": 20}, "got a int"),
        ({"evaluation": {"select": "last"}}, "evaluation = .*instance of Evaluation"),
        ({"network": 3}, "network = 3: .*instance of NetworkModel"),
        ({"run_dir": 3}, "run_dir must be a path, got a int"),
        ({"callbacks": [3]}, "callbacks must be functions that take a RoundEnd, got a int"),
        ({"state_limit": "1GB"}, "state_limit = '1GB': Input should be a valid int"),
        ({"executor": None}, "executor = None: Input should be 'auto', 'loop', 'threads'"),
        (
            {"precision": 16},
            "precision = 16: Input should be 'exact', 'bfloat16'",
        ),
        ({"problem": parsifl.NeuralProblem(nn.Identity)}, "has no parameters"),
        ({"out": "runs/a"}, "^unknown setting 'out'; known: .*, run_dir, "),
        ({"metric": []}, "^unknown setting 'metric'; did you mean 'metrics'"),
    ],
)
def test_arguments_of_the_wrong_kind_are_told(change: dict[str, Any], told: str) -> None:
    given = {
        "algorithm": FedAvg(local_steps=1),
        "problem": parsifl.NeuralProblem(linear, dtype=torch.float64),
        "clients": clients(),
        "rounds": 1,
    }
    with pytest.raises(ConfigError, match=told):
        parsifl.simulate(**{**given, **change})


def test_numbers_of_numpy_are_numbers() -> None:
    problem = parsifl.NeuralProblem(linear, dtype=torch.float64)
    options = {"rounds": np.int64(1), "seed": np.int32(3), "participation": np.float64(0.5)}
    run = parsifl.simulate(FedAvg(local_steps=1), problem, clients(), **options)  # type: ignore[arg-type]  # on purpose
    assert len(run.metrics) == 1


def test_a_folder_with_more_rounds_than_asked_for_is_told(tmp_path: Path) -> None:
    problem = parsifl.NeuralProblem(linear, dtype=torch.float64)
    parsifl.simulate(FedAvg(local_steps=1), problem, clients(), 3, run_dir=tmp_path)
    with pytest.raises(ConfigError, match="already has 3 rounds, more than the 2 requested"):
        parsifl.simulate(
            FedAvg(local_steps=1), problem, clients(), 2, run_dir=tmp_path, resume=True
        )
    again = parsifl.simulate(
        FedAvg(local_steps=1), problem, clients(), 3, run_dir=tmp_path, resume=True
    )
    assert len(again.metrics) == 3


def test_a_problem_of_ones_own_that_is_not_whole_names_what_it_lacks() -> None:
    class Half:
        higher_is_better = False

        def loss(self, params: Any, batch: Any) -> None:
            """Do nothing."""

    with pytest.raises(ConfigError, match=r"got an? Half, which lacks init, .*predict"):
        parsifl.simulate(FedAvg(), Half(), clients(), 1)  # type: ignore[arg-type]  # that is the mistake


def test_arrays_for_a_share_are_not_printed() -> None:
    arrays: Any = [np.arange(1000.0).reshape(100, 10)] * 3
    pairs = [(np.zeros((4, 2)), np.array([0, 1, 0, 1]))] * 3
    with pytest.raises(ConfigError, match="must be a fraction of each client's rows") as error:
        parsifl.simulate(
            FedAvg(), parsifl.NeuralProblem(lambda: nn.Linear(2, 2)), pairs, 1, test=arrays
        )
    assert len(str(error.value)) < 300
    assert "got a list; for your own split, give ClientData the row numbers" in str(error.value)


class Misnamed(Own):
    """Reports "mse" but names another metric."""

    primary_metric = "error"


def test_a_primary_metric_that_is_not_computed_is_named(tmp_path: Path) -> None:
    message = r"Misnamed\.primary_metric is 'error', but its metrics\(\) returns 'mse'"
    with pytest.raises(ConfigError, match=message):
        parsifl.simulate(FedAvg(local_steps=1), Misnamed(), clients(), 1, run_dir=tmp_path / "x")
    assert not (tmp_path / "x").exists()


class LogarithmOfZero(Own):
    """Its loss is NaN at every point."""

    def loss(self, params: Any, batch: Any) -> Tensor:
        nothing: Tensor = (0 * params["w"].sum()).log() * 0
        return super().loss(params, batch) + nothing


def test_a_loss_that_is_not_a_number_at_the_start_is_no_matter_of_lr() -> None:
    with pytest.raises(ClientError) as error:
        parsifl.simulate(FedAvg(local_steps=1), LogarithmOfZero(), clients(), 1)
    assert "its loss is nan at the initial parameters already: check the loss" in str(error.value)
    assert "Lower `lr`" not in str(error.value)


def test_a_step_that_is_too_long_is_a_matter_of_lr() -> None:
    with pytest.raises(ClientError, match="Lower `lr`"):
        parsifl.simulate(FedAvg(local_steps=50, lr=1e30), Own(), clients(), 1)


def pairs(count: int = 3) -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(0)
    return [(draw.normal(size=(8, 4)), np.arange(8) % 3) for _ in range(count)]


def trained(clients: Any, problem: Any = None) -> bool:
    problem = problem or parsifl.NeuralProblem(lambda: nn.Linear(4, 3))
    run = parsifl.simulate(FedAvg(local_steps=1), problem, clients, 1)
    return bool(run.records[0].trained)


def rejected(clients: Any, problem: Any = None) -> str:
    with pytest.raises((ConfigError, DataError)) as error:
        trained(clients, problem)
    return str(error.value)


def test_one_pooled_pair_is_told_how_to_divide_its_rows() -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3
    assert "[(X, y)] for a single client" in rejected((x, y))
    message = rejected((torch.from_numpy(x), torch.from_numpy(y)))
    assert "[(X[i::10], y[i::10]) for i in range(10)]" in message
    assert trained(eval("[(X[i::10], y[i::10]) for i in range(10)]", {"X": x, "y": y}))


def test_lists_of_x_and_of_y_are_told_to_be_zipped() -> None:
    for count in (2, 3):
        x, y = zip(*pairs(count), strict=True)
        assert "write list(zip(X, y))" in rejected((x, y))
        assert "write list(zip(X, y))" in rejected([list(x), list(y)])
        assert trained(list(zip(x, y, strict=True)))
    assert trained([list(pair) for pair in pairs(2)])  # two clients as lists are no mistake


def test_own_splits_and_datasets_train() -> None:
    (x, y), (other, labels) = pairs(2)
    assert trained([(x, y, other[:3], labels[:3])] * 2)
    assert "np.hstack" in rejected([(x, other, y)] * 2)  # several inputs are a mistake
    utils = torch.utils.data
    dataset = utils.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    assert trained([dataset, utils.Subset(dataset, [0, 1, 2, 3, 4])])
    assert "pass its `dataset`, not batches" in rejected([utils.DataLoader(dataset)] * 2)


def test_a_column_of_labels_is_told_to_be_flattened() -> None:
    columns = [(x, y[:, None]) for x, y in pairs()]
    assert "flatten them, y.ravel()" in rejected(columns)
    assert trained([(x, y.ravel()) for x, y in columns])


def test_rows_of_unequal_length_are_not_taken_for_inputs() -> None:
    ragged = [np.ones(3), np.ones(5), np.ones(4)]
    message = rejected([(ragged, np.arange(3))])
    assert "pad or drop rows of other lengths" in message
    assert "np.hstack" not in message
    inputs = [np.ones((3, 2)), np.ones((3, 5))]
    assert "np.hstack" in rejected([(inputs, np.arange(3))])


def test_a_single_output_is_told_to_become_two() -> None:
    def build(outputs: int) -> Any:
        return parsifl.NeuralProblem(lambda: nn.Sequential(nn.Linear(4, outputs)))

    binary = [(x, y % 2) for x, y in pairs()]
    message = rejected(binary, build(1))
    assert "the model has 1 output: cross-entropy needs one output per class" in message
    assert "give the model 2 outputs" in message
    assert trained(binary, build(2))


def test_images_with_channels_last_are_told_to_move_them() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 2))

    problem, draw = parsifl.NeuralProblem(build), np.random.default_rng(0)
    images = [(draw.normal(size=(6, 8, 8, 3)), np.arange(6) % 2) for _ in range(2)]
    message = rejected(images, problem)
    assert "it expects channels first: pass np.moveaxis(X, -1, 1)" in message
    assert trained([(np.moveaxis(x, -1, 1), y) for x, y in images], problem)


def failing(output: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001 - the signature of a metric
    raise ValueError("only one class")


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        (lambda o, y: (o.argmax(-1) == y).float().mean(), r"per row, .* got \[\]: do not average"),
        (lambda o, y: float((o.argmax(-1) == y).double().mean()), r"one number per row, .* float:"),
        (lambda o, y: o, r"must return one number per row, .* got \[\d, 3\]"),  # noqa: ARG005
        (failing, r"metric 'own' fails \(ValueError: only one class\)"),
    ],
)  # fmt: skip
def test_a_metric_that_is_not_per_row_is_named(metric: Any, told: str) -> None:
    problem = parsifl.NeuralProblem(lambda: nn.Linear(4, 3), metrics=[Metric("own", True, metric)])
    message = rejected(pairs(), problem)
    assert "metric 'own'" in message
    assert re.search(told, message)


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        ([failing], r"metrics must be a list such as \[Metric.*got <function failing"),
        ({"own": failing}, r"metrics must be a list such as \[Metric.*got a dict"),
        ([Metric("own", True, failing)] * 2, "two metrics are called 'own'"),
    ],
)
def test_metrics_have_names_and_directions(metrics: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parsifl.NeuralProblem(lambda: nn.Linear(4, 3), metrics=metrics)


def test_a_metric_of_the_problem_is_not_replaced() -> None:
    problem = parsifl.NeuralProblem(linear, dtype=torch.float64)
    named = Metric("loss", True, lambda o, _: o[:, 0])
    with pytest.raises(ConfigError, match="the metric 'loss' is always recorded"):
        parsifl.simulate(FedAvg(local_steps=1), problem, clients(), 1, metrics=[named])


@pytest.mark.parametrize("text", ["dirichlet=0.1", "dirichlet(0.1)", "dirichlet(alpha=0.1)"])
def test_another_form_of_an_option_is_told_ours(text: str) -> None:
    with pytest.raises(ConfigError, match=r"write dirichlet:option=value.*dirichlet:alpha=0\.1"):
        parsifl.data.prepare("digits", clients=3, partition=text)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("wd", "did you mean 'weight_decay'"),
        ("optimizer", "FedAvg has no setting `optimizer`: clients take SGD steps"),
        ("clip_norm", "gradients are not clipped"),
        ("scheduler", "set `lr_decay` or `milestones`"),
    ],
)
def test_settings_of_other_libraries_are_answered(name: str, told: str) -> None:
    settings: dict[str, Any] = {name: 1}
    with pytest.raises(ConfigError, match=told):
        parsifl.get("fedavg", **settings)
