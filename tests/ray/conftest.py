"""A cluster of two nodes, each with its own raylet and object store, on loopback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.families import build_model, build_tokenizer
from tests.support.passages import PASSAGES, QUESTION

ray = pytest.importorskip("ray")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave clusters to `make ray`: they take minutes and all cores."""
    if os.environ.get("QCFUSE_RAY") != "1":
        for item in items:
            if item.get_closest_marker("ray"):
                item.add_marker(pytest.mark.skip(reason="starts a cluster: make ray"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """Return the address of a cluster of two nodes of two cores each."""
    from ray.cluster_utils import Cluster

    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    os.environ |= {"RAY_DATA_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield nodes.address
    ray.shutdown()
    nodes.shutdown()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a tiny model, where workers find it."""
    folder = tmp_path_factory.mktemp("model")
    build_model("llama", max_position_embeddings=2048).save_pretrained(folder)
    build_tokenizer(lambda: [*PASSAGES, QUESTION]).save_pretrained(folder)
    return str(folder)
