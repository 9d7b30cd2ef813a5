"""Order retrieved nodes by their stored caches."""

from __future__ import annotations

from llama_index.core.bridge.pydantic import ConfigDict, Field, model_validator
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from llama_index.llms.qcfuse.base import QCFuseLLM, without_class_name
from llama_index.llms.qcfuse.nodes import text_of


class QCFuseRerank(BaseNodePostprocessor):
    """Keeps the nodes behind which the LLM finds the question likeliest, best first; see `FusionEngine.rerank`.

    It reads the caches that the answer reads, so let the retriever return several times `top_n` nodes. Of a warmed node
    only the question is computed; of other nodes all is. The logger `qcfuse_rag` says what was reused. Its score
    replaces a node's own. Metadata stay as they are, since the warmed text contains them.

    Example:
        ```python
        queries = index.as_query_engine(
            llm=llm, similarity_top_k=12, node_postprocessors=[QCFuseRerank(llm=llm, top_n=3)]
        )
        ```
    """

    model_config = ConfigDict(extra="forbid")
    _from_dict = model_validator(mode="before")(without_class_name)

    llm: QCFuseLLM = Field(description="The LLM that will answer.", exclude=True)
    top_n: int = Field(default=3, description="Number of nodes to keep.", gt=0)
    add_retrieved: bool = Field(
        default=True,
        description="Whether the retriever's scores count as much as the likelihoods; if a node has none, the order of "
        "the nodes does.",
    )
    target_metadata_key: str | None = Field(
        default=None, description="Metadata key of the text that was warmed in place of a node's own; see QCFuseWarmup."
    )

    @classmethod
    def class_name(cls) -> str:
        """Return the class's name in LlamaIndex."""
        return "QCFuseRerank"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if query_bundle is None:
            raise ValueError("nodes are ordered by a question: give query_str or query_bundle")
        found = self.llm.engine.rerank(
            query_bundle.query_str,
            [text_of(node.node, self.target_metadata_key) for node in nodes],
            self.top_n,
            retrieved=[node.score for node in nodes] if self.add_retrieved else None,
        )
        return [NodeWithScore(node=nodes[index].node, score=found.scores[index]) for index in found.order]
