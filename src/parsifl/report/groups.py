"""Group runs: sections by data and score, groups of seeds of one configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parsifl.engine.run_dir import RunData

# these follow from the seed, so they do not define another configuration
_SEEDED = frozenset({"run.seed", "problem.checksum", "data.checksum"})
ABSENT = "not set"


@dataclass(frozen=True)
class RunGroup:
    """The seeds of one configuration, ordered by seed."""

    label: str
    runs: tuple[RunData, ...]

    @property
    def algorithm(self) -> str:
        """The name of the algorithm."""
        return self.runs[0].algorithm

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that the seeds share, with dotted names."""
        return _shared(self.runs[0])


@dataclass(frozen=True)
class Section:
    """Runs that may be compared: the same data and the same score."""

    data: str
    score: str
    maximize: bool
    groups: tuple[RunGroup, ...]
    notes: tuple[str, ...]

    @property
    def title(self) -> str:
        """A description of the data; a user's own arrays have no name."""
        return "own data" if self.data in ("", "own") else self.data

    @property
    def runs(self) -> list[RunData]:
        """All runs of all groups."""
        return [run for group in self.groups for run in group.runs]


def sections(runs: Sequence[RunData]) -> list[Section]:
    """Sort runs into sections, in the order in which they were named."""
    by_data: dict[tuple[str, str, bool], list[RunData]] = {}
    for run in runs:
        by_data.setdefault((run.data, run.score, run.maximize), []).append(run)
    return [_section(*key, members) for key, members in by_data.items()]


def _section(data: str, score: str, maximize: bool, runs: Sequence[RunData]) -> Section:
    notes: list[str] = []
    members: dict[str, dict[int, RunData]] = {}
    for run in runs:
        seeds = members.setdefault(repr(sorted(_shared(run).items())), {})
        if run.seed in seeds:
            notes.append(
                f"{run.path.name} repeats the configuration and seed of "
                f"{seeds[run.seed].path.name} and is skipped"
            )
        else:
            seeds[run.seed] = run
    grouped = [tuple(seeds[seed] for seed in sorted(seeds)) for seeds in members.values()]
    groups = tuple(map(RunGroup, _labels(grouped), grouped))
    notes += [
        f"{run.path.name}: {note}" for group in groups for run in group.runs for note in run.notes
    ]
    notes += [note for group in groups for note in _uneven(group)]
    notes += _environments(groups)
    return Section(data, score, maximize, groups, tuple(notes))


def _uneven(group: RunGroup) -> list[str]:
    lengths = [len(run.records) for run in group.runs]
    if len(set(lengths)) == 1:
        return []
    return [
        f"{group.label}: the seeds have {', '.join(map(str, lengths))} rounds; curves end "
        f"with the shortest run, and totals are means of unequal runs"
    ]


def _environments(groups: Sequence[RunGroup]) -> list[str]:
    environments = [flat(run.environment) for group in groups for run in group.runs]
    changed = differences([environment for environment in environments if environment])
    shown = [
        f"{name} ({', '.join(dict.fromkeys(map(str, values)))})" for name, values in changed.items()
    ]
    return [f"the runs come from different environments: {'; '.join(shown)}"] if shown else []


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration with dotted names.

    >>> flat({"run": {"seed": 0, "network": {"up": 1.0}}})
    {'run.seed': 0, 'run.network.up': 1.0}
    """
    entries: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            entries.update(flat(value, f"{prefix}{name}."))
        else:
            entries[prefix + name] = value
    return entries


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the names on which flat configurations disagree, with the value of each."""
    names = dict.fromkeys(name for config in configs for name in config)
    columns = {name: [config.get(name, ABSENT) for config in configs] for name in names}
    return {
        name: values
        for name, values in columns.items()
        if any(repr(value) != repr(values[0]) for value in values)
    }


def _shared(run: RunData) -> dict[str, Any]:
    return {k: v for k, v in flat(run.config).items() if k not in _SEEDED}


def _labels(grouped: Sequence[tuple[RunData, ...]]) -> list[str]:
    """Name each group by its algorithm, and by the settings that distinguish it."""
    count = Counter(runs[0].algorithm for runs in grouped)
    labels: list[str] = []
    for runs in grouped:
        name = runs[0].algorithm
        peers = [_shared(other[0]) for other in grouped if other[0].algorithm == name]
        shared = _shared(runs[0])
        if count[name] > 1:
            changed = [
                f"{field.rpartition('.')[2]}={shared.get(field, ABSENT)}"
                for field in differences(peers)
            ]
            name = f"{name} {', '.join(changed[:3])}"
        labels.append(name)
    again = Counter(labels)
    return [
        f"{label} [{runs[0].path.name}]" if again[label] > 1 else label
        for label, runs in zip(labels, grouped, strict=True)
    ]
