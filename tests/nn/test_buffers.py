"""Modules with running statistics: leaves that the forward pass moves."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import parsifl
from parsifl.core import tree
from parsifl.core.batching import Batch
from parsifl.core.errors import CapabilityError, ConfigError, ParsiflError
from parsifl.core.keys import Key
from parsifl.core.problem import HasBuffers, split_buffers
from parsifl.engine.run_dir import read_config, read_runs
from parsifl.report.groups import sections
from parsifl.report.paired_gains import baselines

SETTINGS: dict[str, Any] = {"local_steps": 6, "batch_size": 8, "lr": 0.1, "last_batch": "wrap"}
ALGORITHMS = ("fedavg", "fedprox", "ditto", "fedslr")


class Block(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (x + self.norm(self.conv(x))).relu()
        return out


class SmallResNet(nn.Module):
    """A stem, a residual block and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.block, self.head = Block(), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(self.norm(self.stem(x)).relu())
        logits: Tensor = self.head(out.mean((2, 3)))
        return logits


BUFFERS = {
    f"{layer}.running_{name}" for layer in ("norm", "block.norm") for name in ("mean", "var")
}


def images(count: int = 4, rows: int = 24) -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(0)
    labels = [draw.integers(0, 3, rows) for _ in range(count)]
    shift = np.array([-1.0, 0.5, 2.0])
    return [
        (
            draw.normal(size=(rows, 1, 5, 5)) * (1 + y[:, None, None, None])
            + shift[y][:, None, None, None]
            + i / 4,
            y,
        )
        for i, y in enumerate(labels)
    ]


def resnet(buffers: Any = "average", **options: Any) -> parsifl.NeuralProblem:
    return parsifl.NeuralProblem(SmallResNet, buffers=buffers, dtype=torch.float64, **options)


def batch(rows: int = 6) -> Batch:
    draw = torch.Generator().manual_seed(1)
    return Batch(
        torch.randn(rows, 1, 5, 5, generator=draw, dtype=torch.float64) + 3,
        torch.arange(rows) % 3,
        torch.ones(rows, dtype=torch.float64),
        torch.tensor(True),
        torch.tensor(0),
    )


def test_buffers_are_leaves_that_no_gradient_moves() -> None:
    problem = resnet()
    assert isinstance(problem, HasBuffers)
    params = problem.init(Key(0))
    trained, buffers = split_buffers(problem, params)
    assert set(buffers) == problem.buffer_names == BUFFERS
    assert not any(problem.trainable(name) for name in buffers)
    assert all(problem.trainable(name) for name in trained)
    assert not any("num_batches_tracked" in name for name in params)
    assert problem.shapes() == {name: tuple(value.shape) for name, value in params.items()}


def test_the_forward_pass_moves_them_as_torch_does_and_changes_no_argument() -> None:
    problem = resnet()
    params, given = problem.init(Key(0)), batch()
    before = {name: value.clone() for name, value in params.items()}
    loss, moved = problem.loss_and_buffers(params, given)
    module = SmallResNet().double().train()
    module.load_state_dict(params, strict=False)
    expected = nn.functional.cross_entropy(module(given.x), given.y)
    torch.testing.assert_close(loss, expected)
    for name, value in module.named_buffers():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(moved[name], value)
            assert not torch.equal(moved[name], params[name])
    assert tree.same(params, before)
    module.eval()
    module.load_state_dict(moved, strict=False)
    predicted = problem.predict({**params, **moved}, given.x)
    torch.testing.assert_close(predicted, module(given.x))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_residual_network_with_batch_norm_trains(name: str) -> None:
    runs = {
        engine: parsifl.simulate(
            parsifl.get(name, **SETTINGS),
            resnet(),
            images(),
            6,
            participation=0.75,
            executor=engine,
        )
        for engine in ("loop", "fused", "auto")
    }
    executors = [run.metrics[0]["executor"] for run in runs.values()]
    assert executors == ["loop", "vmap", "threads"]
    loop = runs["loop"]
    for run in runs.values():
        assert not run.metrics[-1]["notes"]
        assert not run.metrics[-1]["dropped"]
        for ours, theirs in zip(tree.leaves(run.server), tree.leaves(loop.server), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        for client in range(4):
            for key, value in loop.personal(client).params.items():
                torch.testing.assert_close(
                    run.personal(client).params[key], value, rtol=0, atol=1e-6
                )
    for model in (loop.model, *(loop.personal(client) for client in range(4))):
        variances = [v for n, v in model.params.items() if n.endswith("running_var")]
        assert len(variances) == 2
        assert all(bool((value > 0).all()) for value in variances)
    right = []
    for client, (x, y) in enumerate(images()):
        model = loop.personal(client)
        right.append(model.problem.predict(model.params, x).argmax(-1) == torch.as_tensor(y))
    assert torch.cat(right).double().mean() > 0.6


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_buffers_of_a_single_client_arrive_unchanged(name: str) -> None:
    """Arithmetic on the server (duals, thresholds) would move them, even below zero."""
    algorithm, problem = parsifl.get(name, **SETTINGS), resnet()
    data = images(1)
    first = parsifl.simulate(algorithm, problem, data, 1)
    second = parsifl.simulate(algorithm, problem, data, 2)
    for run in (first, second):
        buffers = split_buffers(problem, run.model.params)[1]
        assert set(buffers) == BUFFERS
    from parsifl.engine.batch_sampler import BatchSampler, Infos

    clients = parsifl.ClientData.of(data)
    info, key = Infos(clients)[0], Key(0, round=1)
    shard = BatchSampler(clients, problem).draw(0, algorithm.batches(info, 1), key)
    received = algorithm.broadcast(problem, first.server, info, key)
    state = algorithm.init_client(problem, info, received, Key(0))
    upload = algorithm.client_update(problem, received, state, shard).upload
    total = algorithm.accumulator(problem)
    total.add(parsifl.core.algorithm.ClientUpload(info, algorithm.weight(info), upload, received))
    server = algorithm.aggregate(problem, first.server, total.total(), key)
    arrived = algorithm.model(problem, server)
    assert arrived is not None
    for buffer in BUFFERS:
        torch.testing.assert_close(arrived.params[buffer], upload[buffer], rtol=1e-14, atol=0)


def test_threads_that_share_a_module_do_not_mix_their_buffers() -> None:
    problem, params = resnet(), resnet().init(Key(0))
    batches = [batch(rows) for rows in range(3, 9)]
    alone = [problem.loss_and_buffers(params, one)[1] for one in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            for ours, theirs in zip(
                pool.map(lambda one: problem.loss_and_buffers(params, one)[1], batches),
                alone,
                strict=True,
            ):
                assert tree.same(ours, theirs)


@pytest.mark.parametrize("name", ["feddyn", "fednova", "fedht", "fedmid", "pfedme", "fedspa"])
def test_algorithms_without_support_say_what_to_do(name: str) -> None:
    with pytest.raises(CapabilityError, match=r"does not support running.*buffers='batch'.*fedavg"):
        parsifl.simulate(parsifl.get(name), resnet(), images(), 1)


def test_without_a_policy_running_statistics_are_rejected_with_the_choices() -> None:
    with pytest.raises(CapabilityError, match=r"layer 'norm'.*buffers='average'.*'local'.*'batch'"):
        parsifl.NeuralProblem(SmallResNet)
    with pytest.raises(ConfigError, match="buffers must be 'average', 'local' or 'batch'"):
        resnet("mean")
    with pytest.raises(CapabilityError, match="momentum=None"):
        parsifl.NeuralProblem(nn.BatchNorm1d(3, momentum=None), buffers="average")


def test_batch_statistics_are_what_adapt_makes() -> None:
    ours = resnet("batch")
    theirs = parsifl.NeuralProblem(
        lambda: parsifl.nn.adapt.adapt(SmallResNet()), dtype=torch.float64
    )
    assert not ours.buffer_names
    settings = parsifl.get("fedavg", **SETTINGS)
    servers = [parsifl.simulate(settings, one, images(), 2).server for one in (ours, theirs)]
    assert tree.same(*servers)


def test_a_module_with_statistics_is_exported_with_them() -> None:
    run = parsifl.simulate(parsifl.get("fedavg", **SETTINGS), resnet(), images(), 2)
    module = run.export()
    x = batch().x
    torch.testing.assert_close(module(x), run.model.problem.predict(run.model.params, x))
    fresh = SmallResNet().double().eval()
    fresh.load_state_dict(module.state_dict())
    torch.testing.assert_close(fresh(x), module(x))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_local_buffers_stay_on_the_clients(name: str, tmp_path: Path) -> None:
    algorithm, problem = parsifl.get(name, **SETTINGS), resnet("local")
    options: dict[str, Any] = {"participation": 0.75}
    average = parsifl.simulate(algorithm, resnet(), images(), 3, **options)
    loop = parsifl.simulate(algorithm, problem, images(), 3, executor="loop", **options)
    batched = parsifl.simulate(algorithm, problem, images(), 3, executor="fused", **options)
    for run in (loop, batched):
        assert not run.metrics[-1]["notes"]
        assert run.metrics[-1]["bytes_up"] < average.metrics[-1]["bytes_up"]
        assert run.metrics[-1]["bytes_down"] < average.metrics[-1]["bytes_down"]
    personal = [loop.personal(client).params for client in range(4)]
    for client, params in enumerate(personal):
        for key, value in batched.personal(client).params.items():
            torch.testing.assert_close(params[key], value, rtol=0, atol=1e-6)
    statistics = torch.stack([params["norm.running_mean"] for params in personal])
    assert len({tuple(row) for row in statistics.tolist()}) > 2  # each client has its own
    with pytest.raises(ParsiflError):
        loop.model  # noqa: B018 - no statistics belong to it
    folder = tmp_path / "run"
    parsifl.simulate(algorithm, problem, images(), 2, executor="loop", run_dir=folder, **options)
    resumed = parsifl.simulate(
        algorithm,
        problem,
        images(),
        3,
        executor="loop",
        run_dir=folder,
        resume=True,
        **options,
    )
    for client, params in enumerate(personal):
        assert tree.same(resumed.personal(client).params, params)


def test_local_buffers_do_not_rename_the_algorithm(tmp_path: Path) -> None:
    for name in ("ditto", "fedavg"):
        algorithm, folder = parsifl.get(name, **SETTINGS), tmp_path / name
        run = parsifl.simulate(algorithm, resnet("local"), images(), 1, run_dir=folder)
    assert repr(run).startswith("Run(FedAvg with local buffers, 1 rounds")
    with pytest.raises(CapabilityError, match="FedAvg with local buffers has no global model"):
        run.model  # noqa: B018 - no statistics belong to it
    described = read_config(folder)["algorithm"]
    assert described["name"] == "fedavg"
    assert described["local_steps"] == SETTINGS["local_steps"]
    (section,) = sections(read_runs([tmp_path]))
    assert [group.algorithm for group in baselines(section)] == ["fedavg"]


def test_algorithms_that_cannot_keep_buffers_local_say_so() -> None:
    with pytest.raises(CapabilityError, match=r"FedNova does not support running statistics"):
        parsifl.simulate(parsifl.get("fednova"), resnet("local"), images(), 1)
    with pytest.raises(CapabilityError, match=r"only parsifl\.simulate keeps them"):
        parsifl.get("fedavg").check_capabilities(resnet("local"))
    run = parsifl.simulate(parsifl.get("local", **SETTINGS), resnet("local"), images(), 1)
    assert not run.metrics[0]["dropped"]
