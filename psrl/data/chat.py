"""Chat traces to token samples.

Every message is tokenised on its own and the pieces are concatenated, so the prompt of step t is, token for token, a
prefix of the prompt of step t + 1. A message in ChatML is ``<|im_start|>role\\n`` (the header: context, never trained),
``content<|im_end|>`` (the body: targets of an assistant message) and ``\\n``. A row with ``"template": "raw"`` is the
plain concatenation of its contents, for completion-style agents.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from psrl.data.rows import Row
from psrl.data.samples import ReplaySample
from psrl.data.tokenizer import IM_END, IM_START, ChatTokenizer
from psrl.errors import InputError

MODES = ("step", "trajectory")
TEMPLATES = ("chatml", "raw")


class ChatMessage(NamedTuple):
    """A message in tokens: header and footer are the template's, the body is what an assistant is trained on."""

    is_response: bool
    header: list[int]
    body: list[int]
    footer: list[int]


class ChatConverter:
    """Turns chat rows into token samples; remembers the ids of the texts that every row repeats."""

    def __init__(self, tokenizer: ChatTokenizer, mode: str = "step") -> None:
        """
        Args:
            mode: ``step``: a sample for every assistant message, its history as the prompt. ``trajectory``: one sample
                for the whole conversation, up to the last assistant message, whose assistant messages are targets.
        """
        self._tokenizer = tokenizer
        self._mode = mode
        self._cache: dict[str, list[int]] = {}

    def convert(self, row: Row) -> list[ReplaySample]:
        """Token samples of a row, steps in order; empty where no message is the assistant's.

        Raises:
            InputError: a field is missing or has a wrong type, the tokenizer lacks the ChatML tokens, or the
                conversation begins with a target; names file and line.
        """
        where, values = row
        uid = _label(where, values, "task")
        session = f"{uid}#{_label(where, values, 'trial')}"
        ids: list[int] = []
        mask: list[bool] = []
        samples: list[ReplaySample] = []
        for message in self.messages(row):
            ids += message.header
            mask += [False] * len(message.header)
            if message.is_response and self._mode == "step":
                step_mask = [False] * len(ids) + [True] * len(message.body)
                samples.append(_sample(where, ids + message.body, step_mask, uid, session, len(samples)))
            ids += message.body
            mask += [message.is_response] * len(message.body)
            ids += message.footer
            mask += [False] * len(message.footer)
        if self._mode == "trajectory" and any(mask):
            end = len(mask) - mask[::-1].index(True)
            samples.append(_sample(where, ids[:end], mask[:end], uid, session, 0))
        return samples

    def messages(self, row: Row) -> Iterator[ChatMessage]:
        """The messages of a row, encoded one by one.

        Raises:
            InputError: a message or the template is malformed; names file and line.
        """
        where, values = row
        messages = values["messages"]
        if not isinstance(messages, list) or not messages:
            raise InputError(f"{where}: messages must be a list with at least one message")
        template = values.get("template", "chatml")
        if template not in TEMPLATES:
            raise InputError(f"{where}: template must be one of {', '.join(TEMPLATES)}, got {template!r}")
        for number, message in enumerate(messages):
            role, content = _message_fields(where, number, message)
            yield self._encode(where, role, content, template)

    def _encode(self, where: str, role: str, content: str, template: str) -> ChatMessage:
        body = list(self._tokenizer.encode(content))
        if template == "raw":
            return ChatMessage(role == "assistant", [], body, [])
        start, end = self._tokenizer.im_start_id, self._tokenizer.im_end_id
        if start is None or end is None:
            raise InputError(
                f"{where}: the tokenizer {self._tokenizer.name} has no {IM_START} or {IM_END}: name another with "
                "--tokenizer ('bytes' is built in)"
            )
        return ChatMessage(
            role == "assistant", [start, *self._repeated(role + "\n")], [*body, end], self._repeated("\n")
        )

    def _repeated(self, text: str) -> list[int]:
        if text not in self._cache:
            self._cache[text] = list(self._tokenizer.encode(text))
        return self._cache[text]


def _sample(where: str, ids: list[int], mask: list[bool], uid: str, session: str, index: int) -> ReplaySample:
    if not ids:
        raise InputError(f"{where}: step {index} has no tokens")
    if mask[0]:
        raise InputError(f"{where}: the conversation begins with the assistant: nothing precedes its first token")
    return ReplaySample(
        where=where,
        input_ids_N=np.asarray(ids, dtype=np.int64),
        loss_mask_N=np.asarray(mask, dtype=np.bool_),
        position_ids_N=np.arange(len(ids), dtype=np.int64),
        advantages_M=np.ones(sum(mask)),
        old_log_probs_M=None,
        uid=uid,
        session=session,
        index=index,
    )


def _label(where: str, values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"{where}: a chat row needs {key} (a string or an integer)")
    return str(value)


def _message_fields(where: str, number: int, message: Any) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise InputError(f"{where}: messages[{number}] must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise InputError(f"{where}: messages[{number}] needs role and content, both strings")
    for name, text in (("role", role), ("content", content)):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            surrogate = f"\\u{ord(text[error.start]):04x}"
            raise InputError(
                f"{where}: messages[{number}]: {name} has half a surrogate pair, {surrogate}, at character "
                f"{error.start}: it is no text"
            ) from error
    return role, content
