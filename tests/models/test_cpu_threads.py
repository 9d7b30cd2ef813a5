"""A model is loaded with the threads of the process's share of the machine, unless the user has chosen their number."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from qcfuse_rag.models.cpu_threads import bound_threads, quotas
from qcfuse_rag.models.load import load_model

V1 = "12:cpuset:/\n4:cpu,cpuacct:/docker/a\n0::/\n"
V2 = "0::/pod/a\n"
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
QUOTA, PERIOD = "cpu/docker/a/cpu.cfs_quota_us", "cpu/docker/a/cpu.cfs_period_us"


def write(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write what a system says of the control groups of this process into a folder that stands for `/`."""
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": files[name] for name in files}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        (V2, {"pod/a/cpu.max": "150000 100000\n"}, 1.5),
        (V2, {"pod/a/cpu.max": "max 100000\n"}, math.inf),
        (V2, {"pod/a/cpu.max": "max 100000\n", "pod/cpu.max": "200000 100000\n"}, 2),
        (V2, {"pod/a/cpu.max": "400000 100000\n", "pod/cpu.max": "200000 100000\n"}, 2),
        (V2, {"pod/a/cpu.max": "200000 100000\n", "pod/cpu.max": "400000 100000\n"}, 2),
        (V2, {"cpu.max": "300000 100000\n"}, 3),  # a container sees its own group as the root
        (V2, {"pod/a/cpu.max/unreadable": "", "cpu.max": "300000 100000\n"}, 3),
        (V2, {"pod/a/cpu.max": ""}, math.inf),
        (V1, {QUOTA: "50000\n", PERIOD: "100000\n"}, 0.5),
        (V1, {QUOTA: "-1\n", PERIOD: "100000\n"}, math.inf),
        (V1, {QUOTA: "50000\n"}, math.inf),
        (V1, {"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ("12:cpuset:/\n", {"cpu.max": "100000 100000\n"}, math.inf),
    ],
)
def test_a_quota_is_the_smallest_of_the_groups_around_the_process(
    groups: str, files: dict[str, str], quota: float, tmp_path: Path
) -> None:
    assert min(quotas(write(tmp_path, groups, files)), default=math.inf) == quota


def test_a_system_without_control_groups_has_no_quota(tmp_path: Path) -> None:
    assert not list(quotas(tmp_path))


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have eight processors of four cores, of which a quota leaves the time of two and a half."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for number in range(8):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    threads = torch.get_num_threads()
    yield write(tmp_path, V2, {"pod/a/cpu.max": "250000 100000\n"})
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("threads", "bounded"),
    [
        pytest.param(8, 3, id="torch's own, a processor"),
        pytest.param(4, 3, id="torch's own, a core"),
        pytest.param(16, 3, id="chosen before there were fewer processors"),
        pytest.param(6, 6, id="the user's"),
        pytest.param(1, 1, id="the user's, less than the share"),
    ],
)
def test_threads_are_bounded_unless_the_user_has_chosen(eight: Path, threads: int, bounded: int) -> None:
    torch.set_num_threads(threads)
    for _ in range(2):
        bound_threads(eight)
        assert torch.get_num_threads() == bounded


@pytest.mark.parametrize("name", VARIABLES)
def test_the_environment_is_left_to_decide(eight: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "8")
    torch.set_num_threads(8)
    bound_threads(eight)
    assert torch.get_num_threads() == 8


def test_without_a_quota_threads_are_at_most_the_processors(eight: Path) -> None:
    (eight / "proc/self/cgroup").unlink()
    for threads, bounded in ((16, 8), (8, 8), (4, 4)):
        torch.set_num_threads(threads)
        bound_threads(eight)
        assert torch.get_num_threads() == bounded


@pytest.mark.usefixtures("eight")
def test_a_model_is_loaded_on_a_cpu_with_bounded_threads(model_folder: str) -> None:
    torch.set_num_threads(16)
    load_model(model_folder, device="cpu")
    assert torch.get_num_threads() <= 8
