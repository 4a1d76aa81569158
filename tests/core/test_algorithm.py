from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass
from typing import Any, ClassVar, final

import pytest
from tests.support.fixtures import TinyFedAvg, classifier
from torch import Tensor

from parsifl.algorithms.ditto import Ditto
from parsifl.algorithms.fedavg import FedAvg
from parsifl.algorithms.local import Local as LocalOnly
from parsifl.algorithms.scaffold import Scaffold, ScaffoldMessage, ScaffoldServer
from parsifl.core.algorithm import (
    AdditiveAlgorithm,
    ClientInfo,
    ClientUpdate,
)
from parsifl.core.batching import DataRequest
from parsifl.core.errors import CapabilityError, ConfigError
from parsifl.core.problem import Layered, Scalable
from parsifl.testing.conformance.examples import restricted

PARAMS = dict[str, Tensor]


@pytest.mark.parametrize(
    ("method", "server", "client", "down", "upload"),
    [
        (FedAvg(), PARAMS, type(None), PARAMS, PARAMS),
        (Ditto(), PARAMS, PARAMS, PARAMS, PARAMS),
        (Scaffold(), ScaffoldServer, PARAMS, ScaffoldMessage, ScaffoldMessage),
        (LocalOnly(), type(None), PARAMS, type(None), type(None)),
    ],
)
def test_the_types_of_the_four_trees_are_read_from_the_hints(
    method: Any, server: Any, client: Any, down: Any, upload: Any
) -> None:
    types = method.tree_types()
    assert (types.server, types.client, types.downlink, types.uplink) == (
        server,
        client,
        down,
        upload,
    )


@final
@dataclass(frozen=True)
class Demanding(TinyFedAvg):
    """Require two capabilities."""

    requires: ClassVar[tuple[type[Any], ...]] = (Layered, Scalable)


def test_a_missing_capability_is_named_with_its_members_and_the_remedy() -> None:
    Demanding().check_capabilities(classifier())
    FedAvg().check_capabilities(restricted(classifier(), ()))
    with pytest.raises(
        CapabilityError,
        match=r"needs a problem that is Layered; .* head, layer_groups; use .*model mlp",
    ):
        Demanding().check_capabilities(restricted(classifier(), ()))
    with pytest.raises(CapabilityError, match=r"is Scalable; .* lacks narrow, shapes"):
        Demanding().check_capabilities(restricted(classifier(), (Layered,)))


@final
@dataclass(frozen=True)
class Careful(TinyFedAvg):
    """Refuse settings that do not go together."""

    def check(self) -> None:
        """Want decay with momentum."""
        if self.momentum and not self.weight_decay:
            raise ConfigError("momentum needs decay")


def test_settings_are_checked_when_a_method_is_built() -> None:
    Careful(momentum=0.5, weight_decay=0.1)
    with pytest.raises(ConfigError, match="momentum needs decay"):
        Careful(momentum=0.5)
    with pytest.raises(ConfigError, match=r"Careful.lr = -1"):
        Careful(lr=-1.0)


def test_a_method_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        FedAvg().lr = 1.0  # type: ignore[misc]  # what must not work


def test_an_abstract_method_cannot_be_built() -> None:
    with pytest.raises(TypeError, match="abstract"):
        AdditiveAlgorithm()  # type: ignore[abstract]  # what must not work


def test_defaults_weigh_by_rows_tune_on_nothing_and_have_no_global_model() -> None:
    info = ClientInfo(3, 17)
    method: Any = LocalOnly()
    assert method.weight(info) == 17.0
    assert method.personalization_batches(info) == DataRequest()
    assert method.model(classifier(), None) is None
    assert info.profile == {}
    assert ClientUpdate(None, None).metrics == {}
