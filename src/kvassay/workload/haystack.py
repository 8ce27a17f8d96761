"""Prose that is on every machine: paragraphs of the standard library's own documentation.

Two sources: the language reference inside `pydoc_data.topics` and the docstrings of a fixed list of modules.
Only paragraphs that read as prose are kept (ASCII, no digits, few symbols), each once. Documents are shuffled
by the seed, the paragraphs of a document stay in order.

The text depends on the Python version, so a recipe records `python` and `sha256`: equal hashes mean equal
text. Documents are divided by name into a `test` part and a `calibration` part with no paragraph in common.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from kvassay.errors import WorkloadError, did_you_mean

_MODULES = """
abc argparse ast asyncio.base_events asyncio.events asyncio.locks asyncio.queues asyncio.streams
asyncio.subprocess asyncio.tasks bdb bz2 cmd code codecs codeop collections compileall
concurrent.futures._base concurrent.futures.process concurrent.futures.thread configparser contextlib csv
ctypes.util dataclasses datetime dbm decimal difflib dis doctest email._header_value_parser
email._policybase email.contentmanager email.feedparser email.generator email.header email.headerregistry
email.message email.policy email.utils enum filecmp fileinput fractions ftplib functools getopt gettext glob
gzip heapq html.parser http.client http.cookiejar http.cookies http.server imaplib importlib._bootstrap
importlib._bootstrap_external importlib.abc importlib.util inspect io json json.decoder json.encoder
linecache locale logging logging.config logging.handlers lzma mailbox mimetypes multiprocessing.managers
multiprocessing.pool multiprocessing.shared_memory ntpath optparse os pathlib pdb pickle pickletools pkgutil
platform plistlib poplib posixpath pprint profile pstats pty py_compile pyclbr pydoc queue quopri random
reprlib sched selectors shelve shutil site smtplib socket socketserver ssl statistics string subprocess
symtable tarfile tempfile textwrap threading timeit tokenize trace traceback tracemalloc turtle typing
unittest unittest.async_case unittest.case unittest.loader unittest.main unittest.mock unittest.result
unittest.runner unittest.suite urllib.parse urllib.request urllib.robotparser uuid warnings wave weakref
webbrowser wsgiref.handlers wsgiref.simple_server xml.dom.minidom xml.etree.ElementTree xml.sax.handler
xml.sax.xmlreader xmlrpc.client xmlrpc.server zipapp zipfile zipimport
"""

MODULES = tuple(_MODULES.split())
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

SPLITS = ("test", "calibration", "all")
SHORTEST = 90  # characters; shorter paragraphs are mostly headings and return-value notes
LETTERS = 0.955  # least share of letters, spaces, commas, full stops and apostrophes


@dataclass(frozen=True)
class Haystack:
    """Documents, each a tuple of one-line paragraphs, with what a recipe must record about them."""

    documents: tuple[tuple[str, tuple[str, ...]], ...]
    sha256: str
    source: str

    def paragraphs(self, rng: random.Random) -> list[str]:
        """All paragraphs, documents in an order drawn from `rng`, paragraphs in their own order."""
        order = list(self.documents)
        rng.shuffle(order)
        return [paragraph for _, paragraphs in order for paragraph in paragraphs]

    def provenance(self) -> dict[str, str]:
        """Where the text is from: source, sha256 of all paragraphs, Python version."""
        return {"source": self.source, "sha256": self.sha256, "python": platform.python_version()}


@lru_cache(maxsize=4)
def load(split: str = "test", path: str | None = None) -> Haystack:
    """Return the prose of one split, or of a UTF-8 text file (blank lines between paragraphs).

    Raises `WorkloadError` for an unknown split, or a file that cannot be read or holds no prose.
    """
    if split not in SPLITS:
        raise WorkloadError(f"unknown haystack split '{split}'{did_you_mean(split, SPLITS)}")
    documents = _file_documents(Path(path)) if path else _stdlib_documents()
    chosen = tuple(doc for doc in documents if split == "all" or _split_of(doc[0]) == split)
    digest = hashlib.sha256()
    for _, paragraphs in chosen:
        digest.update("\n".join(paragraphs).encode() + b"\n")
    return Haystack(chosen, digest.hexdigest(), f"{path or 'python standard library'}:{split}")


def sentences(paragraph: str) -> list[str]:
    """Split a paragraph after `.`, `!` or `?` where a capital letter follows; joining with " " restores it."""
    return re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph)


def _split_of(name: str) -> str:
    """One document in five is for calibration; decided by name, so versions of Python agree."""
    return "calibration" if hashlib.sha256(name.encode()).digest()[0] % 5 == 0 else "test"


@lru_cache(maxsize=1)
def _stdlib_documents() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The documents of the standard library, in a fixed order, every paragraph once."""
    seen: set[str] = set()
    documents = []
    for name, text in [*_topics(), *_docstrings()]:
        kept = tuple(p for p in _prose(text) if not (p in seen or seen.add(p)))  # type: ignore[func-returns-value]
        if kept:
            documents.append((name, kept))
    return tuple(documents)


def _file_documents(path: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """A user's text as documents of 16 paragraphs, so that the seed has something to shuffle."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read as UTF-8 text ({error})") from None
    paragraphs = list(dict.fromkeys(_prose(text)))
    if not paragraphs:
        raise WorkloadError(f"{path}: no paragraph reads as prose (at least {SHORTEST} characters, no digits)")
    return tuple((f"{path.name}#{i}", tuple(paragraphs[i : i + 16])) for i in range(0, len(paragraphs), 16))


def _topics() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    yield from ((f"topics/{name}", topics[name]) for name in sorted(topics))


def _docstrings() -> Iterator[tuple[str, str]]:
    """All docstrings of a module as one document, in reading order; the source is parsed, never imported."""
    for name in MODULES:
        source = _module_source(name)
        if source is not None:
            yield name, "\n\n".join(_docs_of(ast.parse(source)))


def _docs_of(node: _Documented) -> Iterator[str]:
    """The docstring of a module, class or function, then those inside it (not inside `if` or `try`)."""
    yield ast.get_docstring(node) or ""
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docs_of(child)


def _module_source(name: str) -> str | None:
    """The source text of a standard module; None where this Python does not carry it."""
    base = Path(sysconfig.get_path("stdlib"), *name.split("."))
    for path in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def _prose(text: str) -> Iterator[str]:
    """Paragraphs that read as prose, each on one line, mark-up stars removed."""
    for block in re.split(r"\n\s*\n", text):
        if re.search(r">>>|::|^\s*\||==|--", block):
            continue
        paragraph = re.sub(r"^[*\-] ", "", " ".join(block.split()))
        paragraph = re.sub(r"\*(\w[\w ]*)\*", r"\1", paragraph)
        if _reads_as_prose(paragraph):
            yield paragraph


def _reads_as_prose(text: str) -> bool:
    if len(text) < SHORTEST or not text.isascii() or not text[0].isupper() or text[-1] != ".":
        return False
    if re.search(r"[\d_=<>\\{}\[\]@]", text):
        return False
    return sum(c.isalpha() or c in " ,.'" for c in text) / len(text) >= LETTERS
