"""Which networks of several a device trains in a round."""

from __future__ import annotations

from parsifl.algorithms._bases.width_slices import width_of
from parsifl.core.algorithm import ClientInfo
from parsifl.core.keys import Key


def members_for(info: ClientInfo, networks: int, key: Key) -> tuple[int, ...]:
    """Deal the networks out cyclically, from a deck that is shuffled every round.

    A device of width r trains floor(r * networks) of them, at least one; neighbours start at
    neighbouring cards, so that in a round with enough devices every network is trained.

    >>> members_for(ClientInfo(3, 10), 4, Key(0))
    (0, 1, 2, 3)
    >>> len(members_for(ClientInfo(3, 10, {"width": 0.5}), 4, Key(0)))
    2
    """
    # 0.1 * 30 is a little above 3 in floating point, 0.7 * 10 a little below 7
    count = max(1, int(round(width_of(info) * networks, 9)))
    deck = (
        Key(key.seed, round=key.round, purpose="splitmix").numpy_generator().permutation(networks)
    )
    return tuple(sorted(int(deck[(info.id + card) % networks]) for card in range(count)))
