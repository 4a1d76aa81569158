from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from parsifl.core import registry
from parsifl.core.errors import CapabilityError, CheckpointError, ConfigError, DataError
from parsifl.core.keys import Key
from parsifl.core.leaves import LowRank, Sparse, matricize
from parsifl.core.problem import Model
from parsifl.engine.export import Export, StoredTensor, compress, export, load
from parsifl.engine.run import Run
from parsifl.engine.simulate import simulate
from parsifl.nn import models
from parsifl.nn.neural import NeuralProblem


class Odd(nn.Module):
    """Layers of every kind that matters, some of which cannot be split."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Conv2d(3, 12, (3, 5), stride=(2, 1), padding=(1, 2), bias=True)
        self.spread = nn.Conv2d(12, 12, 3, padding=2, dilation=2, bias=False)
        self.grouped = nn.Conv2d(12, 12, 3, padding=1, groups=4)
        self.mirrored = nn.Conv2d(12, 12, 3, padding=1, padding_mode="reflect")
        self.same = nn.Conv2d(12, 12, 3, padding="same")
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.spread(self.plain(x)).relu()
        x = self.same(self.mirrored(self.grouped(x))).relu()
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def low_rank(params: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    found = {}
    for name, value in params.items():
        if value.ndim < 2:
            found[name] = value + 0.1
            continue
        left, sizes, right = torch.linalg.svd(matricize(value), full_matrices=False)
        cut = LowRank(left[:, :rank] * sizes[:rank], right[:rank], tuple(value.shape))
        found[name] = cut.dense()
    return found


def sparse_change(params: dict[str, Tensor], share: float, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        name: value + (torch.rand(value.shape, generator=draw) < share) * 0.05
        for name, value in params.items()
    }


def test_every_kind_of_layer_predicts_as_before(tmp_path: Path) -> None:
    problem = NeuralProblem(Odd)
    params = low_rank(problem.init(Key(0)), 2)
    x = torch.randn(4, 3, 9, 11, generator=torch.Generator().manual_seed(1))
    exported = export(Model(problem, params))
    module = exported.module()
    expected = problem.predict(params, x)
    torch.testing.assert_close(module(x), expected, atol=1e-4, rtol=0)
    kinds = {name: type(module.get_submodule(name)) for name in ("plain", "spread", "head")}
    assert set(kinds.values()) == {nn.Sequential}
    assert module.get_submodule("plain.0").kernel_size == (1, 5)
    assert module.get_submodule("plain.1").kernel_size == (3, 1)
    for name in ("grouped", "mirrored", "same"):
        assert isinstance(module.get_submodule(name), nn.Conv2d)
    exported.save(tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors", problem)
    torch.testing.assert_close(again.module()(x), module(x), atol=0, rtol=0)
    assert again.parameters == exported.parameters < sum(v.numel() for v in params.values())


def test_a_module_that_is_one_layer_is_split_too() -> None:
    problem = NeuralProblem(lambda: nn.Linear(20, 30))
    params = low_rank(problem.init(Key(0)), 3)
    module = export(Model(problem, params)).module()
    assert isinstance(module, nn.Sequential)
    x = torch.randn(5, 20)
    torch.testing.assert_close(module(x), problem.predict(params, x), atol=1e-5, rtol=0)


def test_a_layer_of_full_rank_or_of_zeros_survives() -> None:
    problem = NeuralProblem(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    params = problem.init(Key(0))
    params["1.weight"] = torch.zeros(8, 8)
    exported = export(Model(problem, params))
    assert isinstance(exported.parts["0.weight"].base, Tensor)
    x = torch.randn(5, 8)
    torch.testing.assert_close(exported.module()(x), problem.predict(params, x))


def test_a_clients_file_holds_factors_and_the_sparse_part(tmp_path: Path) -> None:
    problem = NeuralProblem(lambda: models.build("resnet18", width=0.25))
    shared = low_rank(problem.init(Key(0)), 8)
    own = sparse_change(shared, 0.04)
    exported = export(Model(problem, own), Model(problem, shared), client=7)
    part = exported.parts["blocks.6.conv2.weight"]
    assert isinstance(part.base, LowRank)
    assert isinstance(part.extra, Sparse)
    ideal = exported.ideal_bytes
    changes = sum(int((own[name] != value).sum()) for name, value in shared.items())
    kept = sum(part.extra.value.numel() for part in exported.parts.values() if part.extra)
    assert 0 < kept <= changes
    size = exported.save(tmp_path / "client.safetensors")
    assert size < 1.05 * ideal
    again = load(tmp_path / "client.safetensors", problem)
    assert again.client == 7
    x = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(again.module()(x), problem.predict(own, x), atol=1e-4, rtol=1e-4)
    for name, part in again.parts.items():
        assert torch.equal(part.dense(), exported.parts[name].dense())


def _digits() -> list[tuple[Any, Any]]:
    from sklearn.datasets import load_digits

    found = load_digits()
    x, order = (found.data / 16).astype(np.float32), np.argsort(found.target, kind="stable")
    return [(x[part], found.target[part]) for part in np.array_split(order, 10)]


def _run(name: str, **settings: Any) -> Run:
    problem = NeuralProblem(lambda: nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)))
    method = registry.get(name, lr=0.1, local_steps=5, **settings)
    return simulate(method, problem, _digits(), 4, evaluate_every=0)


def test_a_run_exports_its_global_model_and_every_clients() -> None:
    done = _run("fedslr", lam=0.02, mu=0.05)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    assert isinstance(done.server.params["0.weight"], LowRank)
    module = done.export()
    assert isinstance(module.get_submodule("0"), nn.Sequential)
    predicted = done.problem.predict(done.model.params, x)
    torch.testing.assert_close(module(x), predicted, atol=1e-4, rtol=0)
    rank = done.server.params["0.weight"].left.shape[1]
    thin = module.get_submodule("0.0")
    assert isinstance(thin, nn.Linear)
    assert thin.out_features <= rank
    for client in (0, 3):
        personal = done.problem.predict(done.personal(client).params, x)
        torch.testing.assert_close(done.export(client)(x), personal, atol=1e-4, rtol=0)
        assert done.compact(client).parameters < sum(v.numel() for v in done.model.params.values())


@pytest.mark.parametrize("name", ["ditto", "fedrep", "fedspa"])
def test_other_methods_export_what_their_clients_have(name: str) -> None:
    done = _run(name)
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    personal = done.problem.predict(done.personal(2).params, x)
    torch.testing.assert_close(done.export(2)(x), personal, atol=1e-4, rtol=0)


def test_a_method_without_a_global_model_says_so() -> None:
    with pytest.raises(CapabilityError, match="no global model"):
        _run("fedrep").export()


def test_a_report_names_parameters_file_and_latency(tmp_path: Path) -> None:
    exported = _run("fedslr", lam=0.02).compact()
    found = exported.report(torch.randn(2, 64), tmp_path / "m.safetensors", repeats=2)
    assert found["parameters"] < found["dense_parameters"] == 64 * 40 + 40 + 400 + 10
    assert found["file_bytes"] == (tmp_path / "m.safetensors").stat().st_size
    assert found["milliseconds"] > 0
    assert found["file_bytes"] > found["ideal_bytes"] >= 4 * found["parameters"]
    assert found["largest_difference"] < 1e-4


def test_a_report_takes_arrays_and_refuses_what_the_model_cannot_take() -> None:
    exported = _run("ditto").compact()
    assert exported.report(np.zeros((2, 64)), repeats=1)["largest_difference"] < 1e-4
    for wrong, message in (
        (torch.zeros(0, 64), "x is empty"),
        (np.zeros((2, 63)), "cannot take x"),
        (None, "cannot take x"),
    ):
        with pytest.raises(DataError, match=message):
            exported.report(wrong)
    with pytest.raises(ConfigError, match="repeats must be at least 1"):
        exported.report(torch.zeros(2, 64), repeats=0)


@pytest.mark.parametrize("client", ["x", 10, -1, 1.0])
def test_a_client_that_is_not_there_is_refused(client: Any) -> None:
    done = _run("ditto")
    with pytest.raises(ConfigError, match="client must be between 0 and 9"):
        done.export(client)
    assert done.export(2) is not None


def test_only_networks_are_exported() -> None:
    class Other:
        pass

    with pytest.raises(CapabilityError, match="only a problem with a module"):
        export(Model(Other(), {}))  # type: ignore[arg-type]  # a problem of another kind


@pytest.mark.parametrize("harm", ["cut", "flipped", "other model", "no metadata", "missing"])
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, harm: str) -> None:
    problem = NeuralProblem(lambda: nn.Linear(20, 30))
    path = tmp_path / "m.safetensors"
    exported = Export(problem, compress(low_rank(problem.init(Key(0)), 3)))
    exported.save(path)
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif harm == "flipped":
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    elif harm == "other model":
        problem = NeuralProblem(lambda: nn.Linear(20, 31))
    elif harm == "no metadata":
        from safetensors.torch import save_file

        save_file({"weight": torch.ones(30, 20), "bias": torch.ones(30)}, path)
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        load(path, problem)


def test_the_shortest_form_is_chosen() -> None:
    dense = torch.randn(20, 20, generator=torch.Generator().manual_seed(0))
    spikes = torch.zeros(20, 20)
    spikes[3, 4] = spikes[7, 1] = spikes[9, 9] = 1.0
    parts = compress({"dense": dense, "spikes": spikes, "thin": torch.ones(20, 20)})
    assert isinstance(parts["dense"].base, Tensor)
    assert parts["spikes"].base is None
    assert isinstance(parts["thin"].base, LowRank)
    near = compress({"dense": dense + spikes}, {"dense": dense})["dense"]
    # a dense base and a sparse part are more than the dense tensor alone
    assert near.extra is None
    assert isinstance(StoredTensor(dense).dense(), Tensor)


@pytest.mark.parametrize(
    "meta",
    [
        "5", "[]", "null", '"x"', "{", "[" * 10**5, '{"version": 2}', '{"version": 2, "layers": 3}',
        '{"version": 2, "client": null, "layers": {"weight": 3, "bias": {"shape": [30]}}}',
        '{"version": 2, "client": "me", "layers": {"weight": {"shape": [30, 20]}, '
        '"bias": {"shape": [30]}}}',
        '{"version": 2, "layers": {"weight": {"shape": [30, 20], "rank": 1}, '
        '"bias": {"shape": [30]}}}',
        '{"version": 2, "layers": {"weight": {"shape": [30, 20], "nonzeros": 1e9}, '
        '"bias": {"shape": [30]}}}',
    ],
)  # fmt: skip
def test_hostile_metadata_are_an_error_of_the_file(tmp_path: Path, meta: str) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "m.safetensors"
    save_file({"weight": torch.ones(30, 20), "bias": torch.ones(30)}, path, {"parsifl": meta})
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        load(path, NeuralProblem(lambda: nn.Linear(20, 30)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_rejected(tmp_path: Path, value: float) -> None:
    problem = NeuralProblem(lambda: nn.Linear(20, 30))
    params = {**problem.init(Key(0)), "bias": torch.full((30,), value)}
    path = tmp_path / "m.safetensors"
    Export(problem, {name: StoredTensor(leaf) for name, leaf in params.items()}).save(path)
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        load(path, problem)
