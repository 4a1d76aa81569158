from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from parsifl.core.errors import ConfigError
from parsifl.data import registry
from parsifl.data.dataset import Dataset
from parsifl.data.download import Files
from parsifl.data.normalize import normalizations
from parsifl.data.partitions import partition_names

EXPECTED = {
    *("digits", "mnist", "fashion-mnist", "mnist-writers", "cifar-10", "cifar-100"),
    *("femnist-digits", "rcv1", "rcv1-sample", "e2006-tfidf", "libsvm", "domainnet"),
    *("tiny-imagenet", "heart-disease", "communities-crime", "school", "landmine"),
    *("parkinsons-telemonitoring", "fed-tcga-brca", "golub-leukemia", "synthetic"),
    *("fedht-regression", "fedht-classification", "fedgradmp", "text-like", "text-like-e2006"),
}


def test_every_promised_data_set_is_registered() -> None:
    assert set(registry.names()) >= EXPECTED


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_descriptions_are_complete_and_their_defaults_exist(name: str) -> None:
    about = registry.describe(name)
    assert json.loads(json.dumps(about)) == about
    assert all(about[field] for field in ("title", "size", "citation", "licence", "notes"))
    assert about["normalize"] in normalizations()
    assert about["partition"] in partition_names()
    assert about["dtype"] in ("float32", "float64")
    remotes = registry.entry(name).about.remotes
    assert all(url.startswith("http") for remote in remotes for url in remote.urls)
    assert all(remote.urls for remote in remotes)
    plain = [r for r in remotes if any(url.startswith("http:") for url in r.urls)]
    assert all(remote.checksum.startswith("sha256:") for remote in plain)


def test_only_libsvms_page_publishes_no_checksum() -> None:
    bare = {
        name
        for name in registry.names()
        for remote in registry.entry(name).about.remotes
        if not remote.checksum
    }
    assert bare == {"rcv1", "e2006-tfidf"}


def test_names_forgive_hyphens_and_case_but_not_typos() -> None:
    assert registry.entry("Fashion_MNIST").name == "fashion-mnist"
    with pytest.raises(ConfigError, match="did you mean 'mnist'"):
        registry.load("mnits")


def test_options_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown option of dataset 'synthetic' 'alpa'"):
        registry.load("synthetic", alpa=1.0)


def test_two_loaders_cannot_share_a_name() -> None:
    def other(_files: Files) -> Dataset:
        raise AssertionError("it is refused before it could load")

    about = registry.About(title="t", size="s", citation="c")
    with pytest.raises(ConfigError, match="two datasets are called 'digits'"):
        registry.dataset("digits", about)(other)


def test_generated_data_need_no_files(tmp_path: Path) -> None:
    assert registry.fetch("synthetic", tmp_path) == []


def test_importing_the_package_loads_neither_torch_nor_scikit_learn() -> None:
    code = (
        "import sys, parsifl.data as d; d.names(); print({'torch', 'sklearn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
