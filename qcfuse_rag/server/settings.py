"""The settings of a server in this process or on Ray, which are options of `qcfuse serve` too.

Annotations are evaluated here, so that the command line's dataclass can add options to these.
"""

import ipaddress
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le

from qcfuse_rag.bundled import default_model
from qcfuse_rag.errors import QCFuseError
from qcfuse_rag.generation.sampling_params import Fidelity

LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""Host names of the local machine. By DNS rebinding, a web page in a browser can point any other name here as well."""

ORIGIN = re.compile(r"https?://[^/*\s]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """The address, the model's name, the limits and the routes of a server.

    Attributes:
        name: Name of the model for clients; by default its Hugging Face id, or the name of its folder or file.
        host: Address to listen on; an address beyond loopback requires QCFUSE_TOKEN.
        port: Port to listen on.
        waiting: Maximum waiting requests; the server refuses more with 429.
        most_tokens: Maximum tokens of an answer; chat requests that set no limit get 1,024.
        fidelity: Fidelity of requests that name none.
        top_k: Number of passages to retrieve from the library.
        embedder: sentence-transformers id or folder that the passages are embedded with; all-MiniLM-L6-v2 by default.
        retrieve: Retrieve from the library also for requests that have no documents.
        editable: Let clients add and remove documents of the library.
        keep: Warm passages of clients that the store lacked, while no request waits.
        no_playground: Serve no page for browsers at /.
        origins: Web pages that may ask from a browser, such as http://localhost:3000; several by commas.
        token: What clients send as `Authorization: Bearer ...`; None admits every client.
    """

    name: str | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Ge(1), Le(65535)] = 8000
    waiting: Annotated[int, Ge(1)] = 64
    most_tokens: Annotated[int, Ge(1)] = 4096
    fidelity: Fidelity = "fast"
    top_k: Annotated[int, Ge(0)] = 6
    embedder: str | None = None
    retrieve: bool = False
    editable: bool = False
    keep: bool = False
    no_playground: bool = False
    origins: str | None = None
    token: str | None = field(default=None, repr=False)

    def served_name(self, model: str | None) -> str:
        """Return the name of a model, folder or GGUF file for clients; None is the default model.

        A folder of the hub's cache has the hub's id.
        """
        if self.name:
            return self.name
        path = Path(name := model or default_model()).expanduser()
        if not path.exists():
            return name
        path = path.resolve()
        if path.parent.name == "snapshots" and path.parents[1].name.startswith("models--"):
            return path.parents[1].name.removeprefix("models--").replace("--", "/")
        return path.stem if path.suffix.lower() == ".gguf" else path.name

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host names under which clients without a token may ask."""
        return (*LOOPBACK, self.host)

    @property
    def allowed_origins(self) -> list[str]:
        """The origins one by one."""
        return [origin.strip() for origin in (self.origins or "").split(",") if origin.strip()]

    def check(self) -> None:
        """Refuse what cannot be served; asked before the model is loaded."""
        if self.token is None and not _is_loopback(self.host):
            raise QCFuseError(
                f"{self.host} is open to other machines: set QCFUSE_TOKEN to a token for clients, or listen "
                "on 127.0.0.1"
            )
        for origin in self.allowed_origins:
            if not ORIGIN.fullmatch(origin):
                raise QCFuseError(f"--origins names web pages such as https://example.org:8443, not {origin}")

    def listen(self) -> socket.socket:
        """Bind the address; called before the model is loaded, so that an address in use is reported at once."""
        v6 = ":" in self.host
        family, both = (socket.AF_INET6, socket.has_dualstack_ipv6()) if v6 else (socket.AF_INET, False)
        try:  # it listens, too: early clients wait until the model is loaded
            return socket.create_server((self.host, self.port), family=family, dualstack_ipv6=both)
        except OSError as error:
            reason = str(error.strerror or error).partition(" (while")[0]  # `create_server` names the address again
            raise QCFuseError(f"cannot listen at {self.host}:{self.port}: {reason}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
