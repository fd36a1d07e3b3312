"""Configurations and estimates made for tests."""

from typing import Any

from refshard.estimate.candidates import Candidates
from refshard.estimate.estimate import Estimates, estimate
from refshard.specs.cluster import ClusterSpec, load_cluster
from refshard.specs.configuration import Configuration
from refshard.specs.model import load_model


def configuration(**fields: Any) -> Configuration:
    """A configuration of FSDP2."""
    return Configuration(**{"strategy": "fsdp2", **fields})


def columns(*rows: Configuration) -> Candidates:
    """The configurations as columns."""
    return Candidates.of(rows)


def estimated(
    *rows: Configuration, model: str = "llama3-8b", cluster: str | ClusterSpec = "dgx-h100x16", seq_len: int = 8192
) -> Estimates:
    """The estimates of configurations of a preset, on a profile's cluster."""
    on = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return estimate(load_model(model), on, seq_len, columns(*rows))
