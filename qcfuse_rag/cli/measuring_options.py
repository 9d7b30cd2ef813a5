"""The options of commands that measure or calculate: verify, plan and profile."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Option

from qcfuse_rag.cli.options import MethodOptions, ModelOptions, Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions(MethodOptions):
    """Options of `qcfuse verify`."""

    ratio: Annotated[
        float | None,
        Option(help="Only share of reused tokens to try, 0 to 1; by default from 0.05 to the first that passes."),
    ] = None
    store: Annotated[
        Path | None,
        Option(help="Folder of a library, whose passages are used, or of a store; the verdict is saved in it."),
    ] = None
    size: Annotated[int, Option(min=1, help="Number of prompts of each of the three kinds.")] = 8
    tokens: Annotated[int, Option(min=512, help="Length in tokens of the prompts with a hidden answer.")] = 1024
    kl: Annotated[float, Option(min=0.0, help="Maximum mean divergence along answers, in nats.")] = 0.25
    agreement: Annotated[float, Option(min=0.0, max=1.0, help="Minimum share of equal answer tokens.")] = 0.75
    loss: Annotated[float, Option(min=0.0, max=1.0, help="Maximum share of hidden answers lost.")] = 0.1
    tenant: Tenant = None


class Numbers(StrEnum):
    """Number formats of stored keys and values."""

    MODEL = "model"
    INT8 = "int8"
    FP8 = "fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `qcfuse plan`."""

    nodes: Annotated[int, Option(min=1, help="Number of passages in the corpus.")]
    model: Annotated[str, Option(help="Shape of `bench speed`, such as qwen3-8b, or a model folder or id.")]
    tokens: Annotated[int, Option(min=1, help="Tokens per passage.")] = 384
    gpu: Annotated[str, Option(help="GPU: a100, l40s, h100, h200, b200, or here to measure this machine.")] = "h200"
    retrieved: Annotated[int, Option(min=1, help="Passages per request.")] = 10
    ratio: Annotated[float, Option(min=0.0, max=1.0, help="Share of their tokens to recompute.")] = 0.15
    numbers: Annotated[Numbers, Option(help="Number format of stored keys and values.")] = Numbers.INT8
    reached: Annotated[
        float, Option(min=0.01, max=1.0, help="Share of a data sheet's rates to assume; ignored with --gpu here.")
    ] = 0.5
    caches: Annotated[int, Option(min=1, help="Caches per passage; the default method keeps two.")] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions(ModelOptions):
    """Options of `qcfuse profile`."""

    data: Annotated[
        Path | None,
        Option(
            help="JSON lines file of questions, in the format of `qcfuse bench quality --data-dir`; "
            "by default those of the demo."
        ),
    ] = None
    size: Annotated[int | None, Option(min=1, help="Number of questions to use; all by default.")] = None
    layers: Annotated[int, Option(min=1, help="Number of layers to choose.")] = 3
    depth_penalty: Annotated[float, Option(min=0.0, help="Penalty on the recall of deep layers.")] = 0.0
    unlabelled: Annotated[
        bool, Option("--unlabelled", help="Use questions without answers: leave passages out one by one.")
    ] = False
    distractors: Annotated[
        int | None, Option(min=0, help="Passages beside the needed passages; all of a file by default.")
    ] = None
    out: Annotated[Path | None, Option(help="File to write the profile to.")] = None
    store: Annotated[
        Path | None,
        Option(help="Folder of a library or of a store; the profile is kept in it for methods that read it."),
    ] = None
    plot: Annotated[Path | None, Option(help="Image file of the layers to draw.")] = None
