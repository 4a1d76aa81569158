from __future__ import annotations

import pickle

import pytest

from parsifl.core import errors


@pytest.mark.parametrize(
    "kind",
    [
        errors.ConfigError, errors.DataError, errors.CapabilityError, errors.WireError,
        errors.CheckpointError, errors.ClientError,
    ],
)  # fmt: skip
def test_every_error_is_a_parsifl_error_and_in_the_drawing(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.ParsiflError)
    assert f"+-- {kind.__name__} " in (errors.__doc__ or "")


def test_a_client_error_says_where_it_happened() -> None:
    error = errors.ClientError("local", 7, 3, "loss is NaN")
    assert str(error) == "client 7 failed in local of round 3: loss is NaN"
    assert (error.stage, error.client, error.round, error.reason) == ("local", 7, 3, "loss is NaN")


def test_a_client_error_travels_between_processes() -> None:
    error = errors.ClientError("local", 7, 3, "loss is NaN")
    found = pickle.loads(pickle.dumps(error))
    assert str(found) == str(error)
    assert found.client == 7


def test_unknown_names_the_nearest_match_or_all() -> None:
    known = ["fedavg", "fedprox", "ditto"]
    assert errors.unknown("algorithm", "fedprx", known).endswith("did you mean 'fedprox'?")
    assert errors.unknown("algorithm", "zzz", known).endswith("known: ditto, fedavg, fedprox")
    assert "'zzz'" in errors.unknown("algorithm", "zzz", known)
