from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from llama_index.llms.qcfuse import QCFuseLLM, QCFuseWarmup
from qcfuse_rag.bundled import corpus, default_embedder, default_model

llm = QCFuseLLM(model=default_model(), store="kv")  # or any Hugging Face id, folder or GGUF file
embed = HuggingFaceEmbedding(model_name=default_embedder())
documents = [Document(text=text, id_=name) for name, text in corpus().items()]

steps = [SentenceSplitter(chunk_size=512), embed, QCFuseWarmup(llm)]
nodes = IngestionPipeline(transformations=steps).run(documents=documents)
index = VectorStoreIndex(nodes, embed_model=embed)

queries = index.as_query_engine(llm=llm, similarity_top_k=3)
print(queries.query("What is the name of the ambulance boat of Merrin Hospital?"))
