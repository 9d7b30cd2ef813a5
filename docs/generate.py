"""Write the generated parts of the documentation: `make docs`."""

from __future__ import annotations

from pathlib import Path

from qcfuse_rag.cli.describe import describe_methods

ROOT = Path(__file__).parent.parent
METHODS = ROOT / "docs" / "methods.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- methods:begin -->\n", "<!-- methods:end -->\n"


def methods_page(text: str) -> str:
    """Return the page with its table of methods made anew."""
    rows = ["| method | what it does | parameters | source |", "|---|---|---|---|"]
    for method in describe_methods():
        parameters = ", ".join(f"`{name}={value}`" for name, value in method["parameters"].items()) or "none"
        rows.append(f"| `{method['name']}` | {method['does']} | {parameters} | {method['source']} |")
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n".join(rows) + "\n" + END + rest.split(END)[1]


def readme(text: str) -> str:
    """Return the README with its Python blocks taken from the examples, in order."""
    for name in ("llama_index_query_engine.py", "langchain_chain.py"):
        example = (ROOT / "examples" / name).read_text("utf-8")
        marker = f"<!-- examples/{name} -->\n"
        before, rest = text.split(marker)
        text = before + marker + "```python\n" + example + "```\n" + rest.split("```\n", 1)[1]
    return text


if __name__ == "__main__":
    METHODS.write_text(methods_page(METHODS.read_text("utf-8")), "utf-8")
    README.write_text(readme(README.read_text("utf-8")), "utf-8")
