from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from sentence_transformers import SentenceTransformer

from langchain_qcfuse import ChatQCFuse, create_qcfuse_chain
from qcfuse_rag.bundled import corpus, default_embedder, default_model


class MiniLM(Embeddings):  # or any embeddings you use
    encoder = SentenceTransformer(default_embedder())
    embed_documents = lambda self, texts: self.encoder.encode(texts).tolist()
    embed_query = lambda self, text: self.encoder.encode(text).tolist()


chat = ChatQCFuse(model=default_model(), store="kv")  # or any Hugging Face id, folder or GGUF file
documents = [Document(page_content=text) for text in corpus().values()]
chat.warm(documents)

retriever = InMemoryVectorStore.from_documents(documents, MiniLM()).as_retriever(search_kwargs={"k": 3})
find = (lambda inputs: inputs["input"]) | retriever
chain = RunnablePassthrough.assign(context=find) | create_qcfuse_chain(chat)
for piece in chain.stream({"input": "What is the name of the ambulance boat of Merrin Hospital?"}):
    print(piece, end="", flush=True)
