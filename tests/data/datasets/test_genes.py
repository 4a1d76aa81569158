from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from parsifl.core.errors import DataError
from parsifl.data.registry import load


def test_the_real_leukemia_data_have_the_published_counts(real: Path) -> None:
    data = load("golub-leukemia", real)
    assert data.x.shape == (38, 3051)
    assert np.bincount(data.y).tolist() == [27, 11]
    assert len(set(data.feature_names)) == 3051
    # the first entry of multtest's matrix
    assert data.feature_names[0] == "AFFX-HUMISGF3A/M97935_MA_at"
    assert np.isclose(np.asarray(data.x)[0, 0], -1.45769)


def test_a_file_with_other_variables_is_named(home: Path) -> None:
    (home / "golub-leukemia").mkdir()
    head = b"RDX2\nX\n" + bytes(4 * 2 + 3) + b"\2"
    body = (1026, 1, 9, 1)
    blob = head[:7] + b"\0\0\0\2" + bytes(8)
    blob += (
        b"".join(value.to_bytes(4, "big") for value in body) + b"z" + (254).to_bytes(4, "big") * 2
    )
    (home / "golub-leukemia/golub.RData").write_bytes(blob)
    with pytest.raises(DataError, match=r"lacks golub.*it has \['z'\]"):
        load("golub-leukemia", home, verify=False)


def test_a_damaged_file_is_named(real: Path, tmp_path: Path) -> None:
    file = tmp_path / "golub-leukemia" / "golub.RData"
    file.parent.mkdir()
    file.write_bytes((real / "golub-leukemia" / "golub.RData").read_bytes()[:5000])
    with pytest.raises(DataError, match="not an RData file"):
        load("golub-leukemia", tmp_path, verify=False)
