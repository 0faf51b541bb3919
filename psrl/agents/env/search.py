"""Search: questions answered over several turns with a local BM25 index. Needs the ``search`` extra (bm25s)."""

from __future__ import annotations

import json
import re
import string
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import bm25s
import numpy as np

from psrl.agents.env.base import Environment, Observation, task_value
from psrl.errors import InputError

_ACTIONS = ("search[...]", "answer[...]")
_INDEX_LOCK = threading.Lock()


class Document(NamedTuple):
    title: str
    text: str


class SearchIndex:
    """BM25 over the titles and texts of documents. Read-only, so threads may share it."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self._index = bm25s.BM25()
        self._index.index(_tokens([f"{d.title} {d.text}" for d in documents]), show_progress=False)

    def search(self, query: str, num_results: int) -> list[Document]:
        """The best documents, best first; only those that share a word with the query. Ties: the earlier document."""
        [words] = _tokens([query])
        known = [word for word in words if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        best = np.argsort(-scores, kind="stable")[:num_results]
        return [self.documents[i] for i in best.tolist() if scores[i] > 0]


def _tokens(texts: list[str]) -> list[list[str]]:
    words = bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
    return cast("list[list[str]]", words)


def load_index(corpus_file: str) -> SearchIndex:
    """The index of a corpus: JSON lines with ``title`` and ``text``. Built once a process.

    Raises:
        InputError: there is no such file, or a line is no document.
    """
    with _INDEX_LOCK:
        return _load_index(corpus_file)


@lru_cache(maxsize=4)
def _load_index(corpus_file: str) -> SearchIndex:
    path = Path(corpus_file)
    if not path.is_file():
        raise InputError(f"corpus of the task: no file {corpus_file}")
    documents = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            documents.append(Document(str(row["title"]), str(row["text"])))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}:{number}: expected an object with title and text") from error
    if not documents:
        raise InputError(f"{path}: no documents")
    return SearchIndex(documents)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation, articles and surplus spaces (SQuAD's evaluation script)."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


class SearchEnvironment(Environment):
    """Actions ``search[words]`` and ``answer[text]``. Reward 1 for an answer that matches exactly, normalised.

    Keys of a task: ``question``, ``answers`` (any of them is right), ``corpus`` (file of the documents).
    """

    supports_copy = True

    def __init__(self, num_results: int = 3) -> None:
        """
        Args:
            num_results: documents that a search shows at most.
        """
        self.num_results = num_results
        self._index: SearchIndex | None = None
        self._answers: list[str] = []

    def reset(self, task: Mapping[str, Any]) -> Observation:
        question = task_value(task, "question", str)
        self._answers = [normalize_answer(answer) for answer in task_value(task, "answers", list)]
        self._index = load_index(task_value(task, "corpus", str))
        return Observation(f"Question: {question}", admissible=_ACTIONS)

    def step(self, action: str) -> Observation:
        if self._index is None:
            raise InputError("step before reset")
        name, bracket, argument = action.partition("[")
        if not bracket or not argument.endswith("]") or name not in ("search", "answer"):
            return Observation(f"Not an action: {action}", admissible=_ACTIONS)
        if name == "answer":
            right = normalize_answer(argument[:-1]) in self._answers
            return Observation("Right." if right else "Wrong.", float(right), done=True, success=right)
        found = self._index.search(argument[:-1], self.num_results)
        lines = [f"[{i}] {document.title}: {document.text}" for i, document in enumerate(found, start=1)]
        return Observation("\n".join(lines) or "Nothing found.", admissible=_ACTIONS)

    def copy(self) -> SearchEnvironment:
        other = SearchEnvironment(self.num_results)
        other._index, other._answers = self._index, self._answers
        return other
