"""The methods to compare: crossed with what they take, and prepared once for all who need it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.configurations import configurations, split_names
from benchmarks.preparation import prepare
from qcfuse_rag.engine.engine import FusionEngine
from qcfuse_rag.errors import UnknownMethod
from tests.support.passages import PASSAGES


def keys(names: str, *, ratios: tuple[float, ...] = (), bases: tuple[str, ...] = ()) -> list[Any]:
    return [configuration.key for configuration in configurations(split_names(names), ratios, bases)]


def test_methods_are_crossed_with_what_they_take() -> None:
    assert keys("reuse,prophetkv", ratios=(0.1, 0.2)) == [
        ("full", None, 1.0),
        ("reuse", "framed", 0.0),
        ("prophetkv", "blind", 0.1),
        ("prophetkv", "blind", 0.2),
    ]
    assert keys("full,reuse", bases=("blind", "framed"))[1:] == [("reuse", "blind", 0.0), ("reuse", "framed", 0.0)]
    assert keys("prophetkv")[1:] == [("prophetkv", "blind", 0.2)], "published defaults"


def test_the_control_stands_on_the_bases_of_the_methods_it_controls() -> None:
    assert ("random", "blind", 0.1) in keys("random,reuse,qcfuse", ratios=(0.1,))
    assert ("random", "framed", 0.1) not in keys("random,reuse,qcfuse", ratios=(0.1,))
    assert keys("random", ratios=(0.1,))[1:] == [("random", "framed", 0.1)], "alone, its own"
    assert keys("random,qcfuse", ratios=(0.1,), bases=("framed",))[1:] == [
        ("qcfuse", "framed", 0.1),
        ("random", "framed", 0.1),
    ]


def test_a_name_can_carry_parameters() -> None:
    label = "qcfuse[anchor_ratio=0.3,layers=1+2]"
    configuration = configurations(split_names(f"{label}, reuse"), [0.1])[1]
    assert configuration.label == label
    probe = configuration.method.probe
    assert (probe.layers, probe.anchor_ratio) == ((1, 2), 0.3)  # type: ignore[union-attr]
    assert keys("epic[ratio=none,n_tokens=4,base=framed]", ratios=(0.1, 0.2), bases=("blind",))[1:] == [
        ("epic[ratio=none,n_tokens=4,base=framed]", "framed", None)
    ]
    with pytest.raises(UnknownMethod, match=r"name\[parameter=value"):
        keys("qcfuse[3]")


def test_each_preparation_is_done_once_and_charged_to_all_who_need_it(engine: FusionEngine) -> None:
    chosen = configurations(["reuse", "prophetkv", "qcfuse"], [0.1])
    costs = prepare(engine, chosen, [*PASSAGES, *PASSAGES])
    assert set(costs) == {"warm framed", "warm blind"}
    assert all(cost.chunks == 3 and cost.seconds > 0 and cost.size_bytes > 0 for cost in costs.values())
    assert prepare(engine, chosen, PASSAGES)["warm blind"].chunks == 0, "what is there costs nothing"


def test_enriched_passages_are_charged_with_the_framed_ones_they_are_made_from(
    engine: FusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.preparation.embedded_neighbours", lambda passages: [[1], [2], [0]])
    costs = prepare(engine, configurations(["fusionrag", "reuse"], [0.1]), PASSAGES)
    enriched, framed = costs["warm enriched"], costs["warm framed"]
    assert enriched.chunks == framed.chunks == 3
    assert enriched.size_bytes == 2 * framed.size_bytes
    assert enriched.seconds > framed.seconds
