from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs flwr: install the extra parsifl[flower]")

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from parsifl import wire
from parsifl.core.errors import WireError
from parsifl.flower.message import SMALL, STYPE, Envelope, pack, unpack


def test_a_message_survives_the_records() -> None:
    message = Envelope('{"round": 3}', {"upload": b"\x00\xff", "model": b""})
    assert unpack(pack(message)) == message


def test_a_message_without_parts_has_no_array() -> None:
    records = pack(Envelope('{"client": 1}'))
    assert list(records) == ["parsifl"]
    assert unpack(records).parts == {}


def test_a_carried_message_survives_the_records() -> None:
    carried = Envelope('{"round": 2}', {"down": b"\x01", "model": b"\x02"})
    for size in (3, SMALL + 1):
        message = Envelope('{"round": 3}', {"down": bytes(size)}, carried)
        assert unpack(pack(message)) == message


def test_a_small_message_is_one_record_and_a_large_one_has_arrays() -> None:
    small, large = (pack(Envelope("{}", {"upload": bytes(n)})) for n in (SMALL, SMALL + 1))
    assert list(small) == ["parsifl"]
    assert list(large) == ["parsifl", "parsifl.parts"]


def test_the_overhead_of_records_is_small() -> None:
    data = wire.encode({"w": torch.eye(100)})
    records = pack(Envelope('{"client": 1, "round": 2}', {"upload": data}))
    sent = sum(len(part.deflate()) for part in get_all_nested_objects(records).values())
    assert len(data) < sent < len(data) + 300


@pytest.mark.parametrize(
    "records",
    [
        RecordDict(),
        RecordDict({"parsifl": ConfigRecord({"meta": 3})}),
        RecordDict({"parsifl": ConfigRecord({"meta": "{}"}), "parsifl.parts": ConfigRecord()}),
        RecordDict({"parsifl": ConfigRecord({"meta": "{}", "part/upload": "text"})}),
        RecordDict({"parsifl": ConfigRecord({"meta": "{}", "carried/meta": 3})}),
        RecordDict(
            {"parsifl": ConfigRecord({"meta": "{}", **{f"part/{i}": b"" for i in range(9)}})}
        ),
    ],
)
def test_other_records_are_refused(records: RecordDict) -> None:
    with pytest.raises(WireError):
        unpack(records)


def test_an_array_of_another_type_is_refused() -> None:
    records = pack(Envelope())
    records["parsifl.parts"] = ArrayRecord({"upload": Array(np.zeros(3))})
    with pytest.raises(WireError, match=STYPE):
        unpack(records)
