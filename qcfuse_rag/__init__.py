"""RAG answers without re-reading the library every time: stored KV caches, fused per question.

`__init__.pyi` lists the public names and their modules. They are imported when they are first used, so
`import qcfuse_rag` loads neither torch nor transformers.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
