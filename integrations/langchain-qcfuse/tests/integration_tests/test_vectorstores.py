"""LangChain's own tests of vector stores."""

from __future__ import annotations

import pytest
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_tests.integration_tests import VectorStoreIntegrationTests

from langchain_qcfuse import ChatQCFuse, QCFuseVectorStore


class TestVectorStore(VectorStoreIntegrationTests):
    @pytest.fixture
    def vectorstore(self, chat: ChatQCFuse) -> VectorStore:
        return QCFuseVectorStore(InMemoryVectorStore(self.get_embeddings()), chat)
